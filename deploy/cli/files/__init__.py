"""Files that the `sidecar` command writes."""
