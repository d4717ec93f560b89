"""Agents of other libraries and files, each played in a process of its own."""
