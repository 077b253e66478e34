"""What must not come back, and who was champion when: append-only."""
