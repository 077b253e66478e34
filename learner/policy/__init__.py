"""The policy: a base model with its LoRA, its files, and the log-probabilities of answers."""
