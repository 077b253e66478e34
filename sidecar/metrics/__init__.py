"""Prometheus metrics of the proxy, shared by all its workers."""
