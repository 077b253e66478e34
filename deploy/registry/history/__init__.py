"""What must not come back, who held which alias when, and what the audit is about."""
