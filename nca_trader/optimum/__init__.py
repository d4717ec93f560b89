"""The best that can be earned on synthetic markets, and what agents reach of it."""
