"""What `sidecar config check --online` looks at: can these settings run here, now?"""
