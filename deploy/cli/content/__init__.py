"""Commands about what was said: look at it, export it, forget it."""
