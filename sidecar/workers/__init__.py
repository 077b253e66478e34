"""Several proxy processes behind one port, and the parent that watches them."""
