"""Settings of what control asks and tells outside: metrics, the approval service, web hooks."""
