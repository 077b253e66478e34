"""What control asks and tells outside: metrics of a canary, the approval service, web hooks."""
