"""Who acts, of several processes of control on one store, and how long an adapter stays loaded."""
