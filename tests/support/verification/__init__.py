"""Programs for ``verify``: correct ones of many kinds, and faults to plant in a small one."""
