"""Sessions: which conversation, branch and turn each request belongs to, found from its content."""
