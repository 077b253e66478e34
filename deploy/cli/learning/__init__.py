"""Commands about the learner."""
