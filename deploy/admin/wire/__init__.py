"""What the requests and replies of the admin API have in common: scopes, and the description."""
