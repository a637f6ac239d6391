"""Histories with faults: a cluster on a virtual clock that is broken on purpose, and checked.

search        many histories from their seeds, until one is wrong, which is made short
history       what happens to a cluster, as a list that can be written, read and shortened
kinds         what is broken, or changed, and in which ways
shape         the nodes of a cluster and their settings
drawing       a history from its seed: pure
cluster       runs one history
fault_events  what each kind of fault does to a cluster
checks/       what must hold, whatever happens
router        the simulator's router, on streams that break; its books are checked
books/        what a router counts, remembers and chooses, checked
streams       the stream of a router and a node: what gRPC over TCP does to messages
awaited       calls that wait for replies, of code that awaits them
between       messages between nodes, which a router passes on
beside        changes that an administrator asks a router for
demand/       what requests want of nodes, and when nodes may refuse them
roles/        roles that follow the load
node/         a node whose process stops, freezes and restarts
kv/           the real machines of `kv_transfer`, on connections that break and memory that is late
store/        the store of leases, and what routers ask of it
hosts         the clock of each process, and which hosts reach which others
contents      blocks of KV with contents, and the answers that follow from them: pure

Decisions:

A transport loses or repeats nothing that the real one does not. A stream of gRPC keeps its order,
waits while a network is cut, and breaks as a whole: messages that were sent and not read are then
lost, or they were read and their sender does not know it. The same is true of a connection that
carries KV; there the real sender sends again. Only processes, paths, clocks and the store are
broken, so every failure that a history finds can occur in a real cluster.

KV has contents: the token that a step draws depends on every slot that its sequence reads. A block
that is freed too early, written too late, sent to a wrong place or lost changes an answer, and the
right answer follows from the prompt and the seed alone.
"""
