"""Tries of tokens, and attention over them."""
