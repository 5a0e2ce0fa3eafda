"""Rank processes that tests share."""
