"""Benchmarks of a checkout: `python -m benchmarks env`, and scripts of their own."""
