"""The switches by which operators steer the learner."""
