"""The proxy's client of the scoring process, and the messages between the two (best of N)."""
