"""Moves numbered KV blocks from one node's pool into another's, whole and verified or not at all.

It knows nothing of models, requests or scheduling: a decode node reserves blocks and hands out a
ticket, a prefill node writes exactly there, and each side hears once how it ended. A frame of the
KV plane decides nothing; who may write where was decided on the control plane.

    connector       the contract: Ticket, Commit, events, KVConnector
    loopback        LoopbackConnector, LoopbackNetwork: nodes of one process; the reference
    zmq_connector   ZmqConnector: nodes on different machines
    zmq_transport   its sockets
    shell           what all connectors share: one thread, two machines, the fence of `revoke`
    transport       what the shell needs from a network
    pieces          the pool's bytes: checksums, views to send, the one write
    core/           pure: no I/O, no clock, no thread
      frames        headers on the wire, and every check on them
      limits        every bound
      handshake     the states of both sides, as tables
      effects       what the machines ask the shell to do
      chunks        pieces gathered into frames; which pieces are done
      sender        the sending machine: link (one decode node), transfer (one handoff)
      receiver      the receiving machine: sessions (who is connected), landing (one handoff)
"""
