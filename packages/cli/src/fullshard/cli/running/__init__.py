"""``fullshard run``: a script on ranks of this machine or of several, on fullshard, on record.

``launch`` starts the ranks; ``recorded`` is the program of each rank; ``runs`` reads the files of
the ranks; ``tables`` and ``pages`` show them.
"""

__all__: list[str] = []
