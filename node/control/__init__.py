"""Routers call a node here.

control_port     the gRPC port and its bounds
control_service  gRPC messages to values and back
router_calls     the calls on one router's stream, each answered once
block_reports    what each router is told about the blocks in the prefix cache
output_streams   one token stream per router
drain            leaving in order
role             the role that the node registers, and its changes
tickets          tickets of decode nodes, to and from the wire
pulls            what nodes want of each other's caches, to and from the wire

Decisions:

A role is changed in the node first, then in its record in the placement store, with the same
incarnation: nothing that refers to the node becomes void, and its streams stay open. The reply to
the router comes when the store was told, so its next listing has the role.

A draining node refuses with an error of its own type. `Overloaded` would make routers come back and
wait in its queue; `Draining` sends them to another node. Queued reservations are refused too,
because nothing of them was computed.
"""
