"""RULER as plain functions, over message lists and over groups of whole trajectories."""
