"""Exact optima of markets."""
