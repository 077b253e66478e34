"""The data plane: relays requests to vLLM, records them, and chooses which adapter answers."""
