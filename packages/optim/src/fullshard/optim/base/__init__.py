"""The parts that every optimizer uses: shards and their state, options, state dicts that fit."""

__all__: list[str] = []
