"""Sequential statistics of a canary: valid at every look, from a few numbers of state. Pure."""
