"""Training runs: when they start, which groups they take, what they publish."""
