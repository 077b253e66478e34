"""Delete what is too old, too much, or to be forgotten, in short transactions."""
