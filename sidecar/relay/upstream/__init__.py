"""Connections to vLLM, and which replica is healthy and has which adapters."""
