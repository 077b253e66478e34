"""`make bench`: what things cost, beside peers, with targets."""
