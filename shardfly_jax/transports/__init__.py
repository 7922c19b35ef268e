"""Ways to reach another rank's memory, and why each is or is not available here."""
