"""RULER: an LLM judge scores the answers of one group against each other."""
