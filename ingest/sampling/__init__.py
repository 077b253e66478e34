"""Completes chosen groups with candidates from the adapter that answered, within a token budget."""
