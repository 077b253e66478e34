"""Adapter folders after they were made: which are kept, how two differ, copies for elsewhere."""
