"""The HTTP relay between clients and vLLM. docs/architecture.md shows its steps."""
