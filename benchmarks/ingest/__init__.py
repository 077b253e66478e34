"""`ingest`: what it costs to bring records from the bus to the store, and what survives."""
