"""Adapters to users, and back: registry, canary, rollback, admin API, the `sidecar` command."""
