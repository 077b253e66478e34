"""`sidecar store`: what concerns the store as a whole."""
