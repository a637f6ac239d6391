"""What all connectors share: one thread, one queue of effects, two ends.

shell             the connector
connector_parts   what the ends share
sending_end       the sending machine, the pool it reads, its end of every lane
receiving_end     the receiving machine, the pool it writes, the fence of `revoke`
fallbacks         pairs that do without a faster lane: why, until when
transfer_metrics  times and bytes of each transfer and landing
workers           threads that hash and copy
statistics        a snapshot of all counters

Decisions:

The step thread queues what is sent, and does nothing else for it. `open`, `push`, `commit` and
`abort` are calls of the sending machine that the connector's thread makes, in order, so that
machine needs no lock, and a push takes a microsecond for any number of blocks. It becomes frames as
the window opens, in parts of at most 1024 blocks. What is wrong with a push therefore ends its
transfer instead of raising.
"""
