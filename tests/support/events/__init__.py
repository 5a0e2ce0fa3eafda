"""What happens in a step, recorded, ours beside torch's."""
