"""From scored groups to a registered LoRA adapter. Only `learner.grpo` imports torch."""
