"""The evidence of a canary in the admin API."""
