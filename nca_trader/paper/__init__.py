"""Paper trading: feed, broker, journal, session, and the proof that it equals the backtest."""
