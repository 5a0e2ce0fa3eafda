"""``fullshard run``: a script on ranks of this machine or of several, on fullshard, on record.

``launch`` starts the ranks; ``recorded`` is the program of each rank; ``record`` reads what the
ranks wrote.
"""

__all__: list[str] = []
