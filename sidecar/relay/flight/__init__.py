"""One request's way through the relay: plan, upstream attempt, reply, final accounting."""
