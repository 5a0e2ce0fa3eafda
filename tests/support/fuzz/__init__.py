"""Training runs drawn at random."""
