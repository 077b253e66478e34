"""What must not come back, and who held which alias when: append-only."""
