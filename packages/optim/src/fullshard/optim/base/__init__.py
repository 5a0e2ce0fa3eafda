"""What every optimizer needs: shards and their state, options, state dicts that fit."""

__all__: list[str] = []
