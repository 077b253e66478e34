"""What the judges cost and how they do, as the control process tells it."""
