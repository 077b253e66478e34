"""Which adapter answers a session: routing table, session key, and the canary's breaker."""
