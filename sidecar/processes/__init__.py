"""How processes are started, report that they are ready, and end with their parent."""
