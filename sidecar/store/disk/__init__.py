"""What a store takes on the disk, and what deleted rows leave there."""
