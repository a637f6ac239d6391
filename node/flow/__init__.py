"""A node's decisions, and how they are carried out: pure where nothing else is said.

node_flow         the decisions around the scheduler: messages in, effects out
prefill           the life of a prompt that is sent on; decode: of a reservation
shared_parts      what both of them have
attempts/         the attempts on a node, from their queue to what routers hear of them
pulls/            what nodes take out of each other's prefix caches
disk/             what a node reads from disk where that pays, and what it writes there
pause             a time in which something that failed is left alone
layers_to_push    when layers of computed blocks are handed to the connector
landing_place     where KV of other nodes lands, and the tickets that let it
flow_limits       which requests a node could never answer
messages          messages to the step thread, and the effects that it wants
current_load      the node's load as routers see it
copies_under_way  copies of KV blocks, and what follows their ends
step_progress     whether steps end, by how long they usually take
inbox             the bounded queue of messages to the step thread (threads)
perform_effects   performs the effects that the step thread wants (I/O)

Decisions:

What an attempt is decides what is done with it, not the role of the node: a prompt that is sent on,
a reservation to be filled, or a reservation whose prompt is computed here because the router asks
for that or because it is short. So a role is only what a node registers and what routers send it
then, and it can change at any time: what the node has goes on as it began, and a router that knows
an earlier role is served as well.
"""
