"""What users said and others need not read: find it, hide it, and keep it out of training."""
