"""Results as HTML pages that need no network: a plan, a verdict, a report about races.

``page.write_page`` writes tables and figures into one file. The other modules choose the contents.
"""

__all__: list[str] = []
