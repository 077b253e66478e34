"""What a judge is shown of messages: which parts, escaped how, and how much of them. Pure."""
