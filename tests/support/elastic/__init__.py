"""Replica groups as processes, what strikes them, and the replay that they are compared with."""
