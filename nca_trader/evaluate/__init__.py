"""What a strategy is worth: backtests, figures, and a page that says them honestly."""
