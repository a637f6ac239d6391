"""Move numbered KV blocks from one node's pool into another's, whole and verified or not at all.

The package knows nothing of models, requests or scheduling. A decode node reserves blocks and
issues a ticket, a prefill node writes exactly these blocks, and each side is notified once of the
outcome. Frames of the KV plane grant no rights: the control plane decides who may write where.

    contract    Ticket, Commit, events, KVConnector
    zmq/        nodes on different machines
    connector/  what all connectors share: one thread, one queue of effects, two ends
    lanes/      how the bytes get from pool to pool
    sending/    the sending machine; receiving/: the receiving one. Neither knows the other
    wire/       what is on the wire
    shared/     bounds, states and effects of both machines
    transport   what a connector needs of a network: one connection for the frames of a pair
    transfer_timing  the times of one transfer
    own_cache   where the compiled kernels of this package are kept

The machines, the wire and what they share are pure: no I/O, no clock, no thread.
"""
