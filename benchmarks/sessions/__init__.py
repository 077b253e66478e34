"""Streams of agent requests with known truth, and the score of any session finder on them."""
