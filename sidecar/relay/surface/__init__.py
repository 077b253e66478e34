"""The API paths that the relay serves, and the errors that it answers itself."""
