"""Learning from whole tasks: a simulated site, grouped and rewarded by the product's own code."""
