"""The lines of adapters, each in short, and what vLLM has loaded of them."""
