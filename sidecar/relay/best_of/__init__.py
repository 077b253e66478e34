"""Best of N: asks vLLM for N answers and returns the one that the judge scores highest."""
