"""Adapters in vLLM: validates folders, loads and probes them, compares replicas with the store."""
