"""`make bench BENCH=sabotage`: a good candidate and four sabotaged ones, on the real vLLM."""
