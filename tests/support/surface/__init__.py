"""A small model for tests of the wrappers' names, and what ranks see of it."""
