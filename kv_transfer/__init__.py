"""Move numbered KV blocks from one node's pool into another's, whole and verified or not at all.

The package knows nothing of models, requests or scheduling. A decode node reserves blocks and
issues a ticket, a prefill node writes exactly these blocks, and each side is notified once of the
outcome. Frames of the KV plane grant no rights: the control plane decides who may write where.

    connector       the contract: Ticket, Commit, events, KVConnector
    zmq_connector   ZmqConnector: nodes on different machines
    zmq_transport   its sockets; curve_keys: the key pair that encrypts them
    zmq_readiness   which of the sockets have something to read
    endpoints       KV addresses as text; name_lookup: host names, resolved in other threads
    open_files      how many files are left; without any, a port would spin
    zmq_gate        authentication of connections when the cluster has a key
    own_cache       where the compiled kernels of this package are kept
    zmq_parts       payload that ZMQ sends out of this process's memory
    shell           what all connectors share: one thread, one queue of effects, two halves:
      sending_end     the sending machine, the pool it reads, its end of every lane
      receiving_end   the receiving machine, the pool it writes, the fence of `revoke`
    connector_parts what the halves share
    wake_up         wakes that thread: free while it is awake
    transport       what the shell needs from a network: one connection for the frames of a pair
    lane            how the bytes get from pool to pool, and three ways for it:
      inline_lane   behind the header, on the same connection
      shm/          copied out of the sender's pool, which is shared memory
      rdma/         written into the receiver's registered pool
    fallbacks       pairs that do without a faster lane: why, until when
    transfer_metrics  times and bytes of each transfer and landing; transfer_timing: of one transfer
    workers         threads that hash and copy
    statistics      a snapshot of all counters
    pool_memory     a pool: memory of the host or of a device, its addresses and aliases
    pieces          the pool's bytes: checksums, and the one write
    piece_rows      the same in one pass, where fused_copy can: a kernel that copies and hashes
    gather          message parts out of a pool
    core/           pure: no I/O, no clock, no thread
      frames        headers on the wire, with greetings; field_checks, header_seal: the checks
      limits        every bound
      lanes         names of the lanes and of the ways to verify
      layout_field  the layout in a greeting, as earlier releases refuse it
      handshake     the states of both sides, as one table
      effects       what the machines ask the shell to do
      deadlines     times at which something is to be looked at
      block_arrays  numbers of blocks as arrays
      pool_shape    where the pieces of a pool are
      chunks        pieces gathered into frames; which pieces are done
      joining       how many chunks become one frame
      sender        the sending machine: links (all of them, with their deadlines), link (one
                    decode node), channels and further_channels (its connections), pump (which
                    frames may be sent), shared_window (what they may send together),
                    transfer (one handoff), turns (which one sends next),
                    unreachable (decode nodes that did not answer), transfer_errors,
                    link_rates (which transfers are too slow)
      receiver      the receiving machine: sessions (connected senders), connections (how they
                    begin and end), window_shares (what each of them may send), landings (all of
                    them, with their blocks), landing (one handoff),
                    copies (what is being copied, and what waits for that),
                    quarantine (blocks that a sender may still write), slab_fences (how those
                    of a dead sender come back), damaged (pieces that are asked for again)
"""
