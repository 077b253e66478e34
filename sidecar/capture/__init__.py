"""Turns a finished request into an `Exchange` and writes it to the bus, off the request's path."""
