"""Files in, records out. No torch."""
