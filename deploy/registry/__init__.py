"""Adapter versions, aliases, canaries and the routing table in the store, and their rules."""
