"""What `sidecar canary wait` and `watch` see of a canary until it has ended."""
