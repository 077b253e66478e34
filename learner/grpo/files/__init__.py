"""What the trainer keeps on disk: moments beside an adapter, and checkpoints of a run."""
