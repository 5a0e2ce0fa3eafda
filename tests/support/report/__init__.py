"""The report of a card: tests, losses, memory and times on it, for a person to attach."""
