"""The judges that a process asks: what stands between RULER and a model's API."""
