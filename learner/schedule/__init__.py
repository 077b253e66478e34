"""When runs start: the clock, the rule, and what the learner tells of both."""
