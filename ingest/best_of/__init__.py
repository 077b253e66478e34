"""Best of N in the scoring process: judges answers while a user waits, and keeps the scores."""
