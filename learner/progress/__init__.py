"""How far a run is, what each of its steps did, and who is told."""
