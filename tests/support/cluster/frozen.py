"""Leaves out of collections of garbage what a template has made, when this is imported.

A collection writes into every object that it looks at, so each fork would copy most of the memory
that it shares with its template. The parser of commands is made here, as every role has one.
"""

from common.long_lived import exclude_from_collection
from pdserve.configuration.flags import build_parser

build_parser()
exclude_from_collection()
