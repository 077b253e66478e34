"""Several processes that compute one run: dealing, exchange, shares of the base, their start."""
