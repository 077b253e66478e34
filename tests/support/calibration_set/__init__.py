"""Write the calibration set that the product ships: from hand-written texts, by rules."""
