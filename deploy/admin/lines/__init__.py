"""The lines of adapters, each in short."""
