"""`sidecar forget`: remove what a user, a session or an exchange said, wherever it is kept."""
