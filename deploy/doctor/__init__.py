"""`sidecar doctor`: at which stage records stop, why, and what to do."""
