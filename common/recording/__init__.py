"""Recordings: the inputs and the decisions of a process, as lines of JSON.

values      values of this project as JSON, and back
pseudonyms  names of blocks and sessions, so that a recording shows only which are equal
file        the file, whose size is bounded
calls       an object whose calls are written down

Decisions:

Calls of pure machines are recorded, and nothing below them. What such a machine decides follows
from its calls, so the same calls of a new one give the same decisions, or there is a bug: a clock,
a random number or an order of a set that it should not see. Times are arguments of calls, so a
replay has no time of its own.

A machine is recorded by an object in its place (`calls.recorded`). Where nothing is recorded there
is no such object: it costs nothing.

A recording holds no text and no token. Machines see prompts by their lengths and the hashes of
their blocks, and a hash of a prompt that can be guessed would confirm the guess. So each process
draws a key, which is never written, and writes hashes under it.
"""
