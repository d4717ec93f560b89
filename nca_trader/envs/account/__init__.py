"""One account: its state, its charges, and its step through a bar."""
