"""The canary controller: loads a candidate, runs the gate, counts what users get."""
