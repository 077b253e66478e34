"""What the help of each command adds to its docstring: an example, and its exit codes."""
