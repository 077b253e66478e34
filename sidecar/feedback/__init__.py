"""Feedback and outcomes that clients send: read, made into records, written to the outbox."""
