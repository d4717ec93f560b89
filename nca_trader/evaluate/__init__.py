"""Backtests, their metrics and baselines, and a report page."""
