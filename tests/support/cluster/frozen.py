"""Leaves out of collections of garbage what a template has imported, when this is imported.

A collection writes into every object that it looks at, so each fork would copy most of the memory
that it shares with its template.
"""

from common.long_lived import exclude_from_collection

exclude_from_collection()
