"""Venues that fill orders: the simulated exchange, and Alpaca's paper accounts."""
