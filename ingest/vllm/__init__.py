"""vLLM as a source of candidates: sampler, replicas, load, and facts that no request shows."""
