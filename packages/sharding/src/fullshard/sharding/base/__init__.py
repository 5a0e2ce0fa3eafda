"""The base of the package: checks, states, leases and generations; no parameter, no mesh."""

__all__: list[str] = []
