"""What an error must say: the words that a test looks for."""

from __future__ import annotations

import re


def says(*words: str) -> str:
    """A pattern that finds all of ``words`` in a message, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)
