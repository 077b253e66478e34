"""How fast, and at what cost to users, a rollback takes effect on several proxies under load."""
