"""The relay benchmark: the proxy beside nginx, vllm-router, LiteLLM and rLLM's gateway."""
