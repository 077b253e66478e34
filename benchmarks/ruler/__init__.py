"""RULER beside openpipe-art's own: agreement, tokens, speed, kills, and what users notice."""
