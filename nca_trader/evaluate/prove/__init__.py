"""Agents on markets whose optimum is known."""
