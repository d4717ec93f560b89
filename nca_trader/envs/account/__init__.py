"""One account: its state, what it is charged, and how a bar moves it."""
