"""What all connectors share: one thread, one queue of effects, two ends.

shell             the connector
connector_parts   what the ends share
sending_end       the sending machine, the pool it reads, its end of every lane
queued_calls      calls of the sending machine that other threads queue
receiving_end     the receiving machine, the pool it writes, the fence of `revoke`
fallbacks         pairs that do without a faster lane: why, until when
transfer_metrics  times and bytes of each transfer and landing
workers           threads that hash and copy
card_ring         a card's pool for lanes of the host: through slots in host memory
frames_to_send    frames of each connection, in order, and the slots they hold
statistics        a snapshot of all counters

Decisions:

The step thread queues what is sent, and does nothing else for it. `open`, `push`, `commit` and
`abort` are calls of the sending machine that the connector's thread makes, in order, so that
machine needs no lock, and a push takes a microsecond for any number of blocks. Pushes that wait
together are taken together, with one acknowledgement. They become frames as the window opens, in
parts of at most 1024 blocks. What is wrong with a push therefore ends its transfer instead of
raising.

Where a pool is on a card, lanes of the host see a ring: a small pool of the same layout, in which a
block is a slot for any layer. A lane reads and writes blocks in their places, and does not know
that these are slots: the connector has blocks copied to slots before, and to the card after they
were verified, and gives a lane the slots' numbers in place of the blocks'. So does it for blocks of
host memory where a lane's receivers reach the ring alone. So lanes, frames and
machines are the same for pools in host memory, which nothing is copied for, and a transfer may
change its lane in the middle. The lane between cards uses no ring.

Slots are lent in the order in which they are asked for, and no frame holds some while it asks for
more. Those for sending and for receiving are apart: a node that receives never waits for a peer to
acknowledge, so acknowledgements always come, and with them slots for sending.
"""
