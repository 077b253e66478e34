"""Checks recorded token ids against the text, with the base model's tokenizer."""
