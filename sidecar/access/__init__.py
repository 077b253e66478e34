"""Who may ask the model, under which key, and how much: keys, limits and the refusals of both."""
