"""Changes that the admin API makes: once for each key; canaries begun by hand; aliases."""
