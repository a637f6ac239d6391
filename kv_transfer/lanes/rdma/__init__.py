"""The lanes by RDMA: the sender writes the receiver's pool, or the receiver reads its ring.

slabs            pure: the pool divided into slabs; the addresses of a chunk's bytes in both pools
aliases          other addresses for the same memory, for slabs that were fenced
registered_pool  a receiver's pool: the keys and the present address of each slab, fences
rdma_lane        between pools in host memory: what is agreed on, targets of writes
read_lane        between pools on cards: what is read out of a sender's ring
ring_reads       pure: the reads under way from each sender, and those that failed
read_fences      pure: when the slots that a read failed into are free
batch_queue      pure: what is moved to or from one peer, in batches
peer_batches     the thread that writes to one peer or reads from it, in batches
mooncake_engine  Mooncake's Transfer Engine: the only importer of it

Decisions:

A fence moves the memory. Deregistering a memory key and creating a new one for the same addresses
does not stop a writer of the Mooncake Transfer Engine, because its retry asks for the new key. The
pool of a node that is written by RDMA is therefore shared memory, and a fenced slab is registered
at another mapping of it, at addresses that no dead writer knows.

A fence waits for reports, not for an empty slab. Where many prompts are computed, there is always a
landing in each slab, so a fence that waits for none would never come. The slab is registered at
both addresses until every connected sender has reported that its writes to the old one are done.
The report needs no frame of its own: a sender on this lane answers each FAILED with an ABORT after
its writes, also a FAILED of no lease, and has done so since KV protocol version 4.

Rings are read, not written. A receiver that grants landing slots to its senders depends on them: a
slot that was granted cannot be used for another sender before this one has used it or was fenced,
so a sender that stands still holds slots, and its death asks for the slabs, reports and quarantine
of the other lane. One that reads decides by itself when it reads what, into slots that only it
uses, and an old frame is dropped as on every lane where the receiver copies. It costs a round trip
for each frame, of which a window holds several.

The slots of a failed read are fenced too, and checksums would not do instead: a late read may
change a slot after its sums were computed and before the card has it. This fence needs nobody's
report, since all who read into the slots are threads of this process. Sums are computed besides,
for `commit` at least, whatever is configured: the lane was run on devices in software alone.

A read that fails loses nothing. Its target is a slot, of which the card has seen nothing, so its
frame counts as not received: the connection begins anew over another lane, and the sender sends
again what it holds in its slots until they are acknowledged.

The whole ring is registered at the start. Its memory is then taken at once, unlike that of a ring
that other lanes use; but what is too much for the limit of locked memory shows at the start.
"""
