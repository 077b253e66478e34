"""What a killed run leaves, so that the next start goes on from its last finished step."""
