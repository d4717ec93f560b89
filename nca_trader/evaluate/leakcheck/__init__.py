"""Searches a strategy for look-ahead."""
