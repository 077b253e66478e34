"""vLLM as a source of candidates: sampler, replicas, load, and what it does unasked."""
