"""One session: the loop, its account, orders and halts, and what the journal rebuilds of it."""
