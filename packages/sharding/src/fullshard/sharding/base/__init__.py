"""What all rooms rest on: checks, states, leases and generations; no parameter, no mesh."""

__all__: list[str] = []
