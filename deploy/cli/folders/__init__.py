"""`sidecar adapters`: what concerns the folders of versions on this machine."""
