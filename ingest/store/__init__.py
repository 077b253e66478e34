"""What ingest reads and writes in the store: exchanges and groups."""
