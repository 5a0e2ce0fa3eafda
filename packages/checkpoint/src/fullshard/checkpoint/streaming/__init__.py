"""Full parameters of a sharded model as a stream, while training goes on."""

__all__: list[str] = []
