"""What the weights of a run depend on, and whether two runs have it in common."""
