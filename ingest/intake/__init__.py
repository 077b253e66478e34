"""The ingest process: reads the bus, stores exchanges, chooses which become groups."""
