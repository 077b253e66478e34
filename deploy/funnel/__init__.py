"""Where records are between a request and an adapter, from durable counters."""
