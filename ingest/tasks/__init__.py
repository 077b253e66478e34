"""Whole sessions as attempts at tasks: who is compared with whom, and by what."""
