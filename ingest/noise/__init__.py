"""The judge's noise: a share of the groups is scored again later, and the two scorings compared."""
