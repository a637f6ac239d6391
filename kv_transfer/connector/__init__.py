"""What all connectors share: one thread, one queue of effects, two ends.

shell             the connector
connector_parts   what the ends share
sending_end       the sending machine, the pool it reads, its end of every lane
receiving_end     the receiving machine, the pool it writes, the fence of `revoke`
fallbacks         pairs that do without a faster lane: why, until when
transfer_metrics  times and bytes of each transfer and landing
workers           threads that hash and copy
card_mirror       a card's pool for lanes of the host: copied out before, copied in after
statistics        a snapshot of all counters

Decisions:

The step thread queues what is sent, and does nothing else for it. `open`, `push`, `commit` and
`abort` are calls of the sending machine that the connector's thread makes, in order, so that
machine needs no lock, and a push takes a microsecond for any number of blocks. It becomes frames as
the window opens, in parts of at most 1024 blocks. What is wrong with a push therefore ends its
transfer instead of raising.

Where a pool is on a card, only the connector knows of its mirror in host memory. Blocks are pushed
when the card has computed them, and have arrived when the card has them. A lane of the host has
blocks copied to the mirror when it sends them, and to the card when it has verified them; the lane
between cards uses no mirror. So a transfer may change its lane in the middle: no owner of blocks
decides beforehand where their bytes have to be.
"""
