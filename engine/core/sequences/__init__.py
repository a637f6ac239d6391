"""Sequences from the queue to the end.

sequence       one stream of tokens on one node
status         the life of a sequence, as one table
stop_rules     when an output is complete, by tokens alone
waiting_queue  sequences without a seat, in order
running        the running sequences, by arrival
seats          the seated sequences as arrays, changed in place
prefix_index   block hashes of sequences, looked up and published

Decisions:

A step is a few arrays over seats. Every seated sequence has a row of tokens, blocks and sampling
parameters in `engine/core/sequences/seats.py`, changed in place when it gets a token or a block. A
step names rows, first positions and counts (`engine/core/step/step_batch.py`); the runner lays it
out in one call (`engine/runner/kernels/step_rows.py`), and the reservation of all seated sequences
is one sum over columns. Tokens and blocks of a seated sequence are in its row alone: its `Sequence`
reads them there, and holds them itself only while it waits and when it has left. An entry for a
single sequence is made only where one is requested: in the fakes of the tests and in the replay.
The outputs of a step are columns too. They become single ones when they are reported, beside the
next step, except for those that begin or end something.
"""
