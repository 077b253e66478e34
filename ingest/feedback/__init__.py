"""Feedback, outcomes and implicit signals: stored, joined to exchanges, derived, read back."""
