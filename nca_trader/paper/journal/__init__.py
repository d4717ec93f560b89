"""The journal of a session: events in a chain of hashes, read and written."""
