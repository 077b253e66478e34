"""What is known of the judge, for the operator and for sampling."""
