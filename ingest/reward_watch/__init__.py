"""Watch for rewards that are earned without better answers, and say when the learner is held."""
