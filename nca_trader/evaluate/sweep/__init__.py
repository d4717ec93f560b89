"""A grid of parameters as one program, and its parts."""
