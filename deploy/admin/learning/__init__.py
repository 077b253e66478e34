"""Training runs on the admin API."""
