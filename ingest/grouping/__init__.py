"""Rules that decide which exchanges become groups, and which answers a group may contain."""
