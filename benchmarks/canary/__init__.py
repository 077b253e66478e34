"""What the canary's rule decides on simulated traffic: false promotions and rollbacks, power."""
