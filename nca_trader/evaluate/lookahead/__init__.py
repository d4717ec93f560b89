"""Checks that nothing looks ahead."""
