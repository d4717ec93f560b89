"""Exported agents: arrays, and what quantising does to them."""
