"""Feeds of bars: replayed, followed, of a venue, and downloads of history."""
