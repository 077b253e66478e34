"""Reads and edits the JSON of requests and replies in place, without parsing all of it."""
