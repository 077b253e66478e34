"""`sidecar up`: starts the processes of one machine, restarts them, stops them."""
