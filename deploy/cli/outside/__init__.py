"""Commands about what control asks and tells outside."""
