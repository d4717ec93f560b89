"""A backtest as one HTML page."""
