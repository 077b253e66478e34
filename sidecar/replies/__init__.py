"""Reads a captured reply of each API surface into an assistant message, and checks it."""
