"""How far a judge can be trusted: its scores beside known ones, on groups from a file."""
