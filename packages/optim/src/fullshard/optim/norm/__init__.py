"""The norm of all gradients, and clipping by it."""
