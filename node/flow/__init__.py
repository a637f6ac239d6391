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

A reservation holds its blocks from its ticket on, while its prompt waits and is computed elsewhere,
and not from the prompt's first step on. So layers leave as they are computed, and no prefill node
keeps computed blocks for want of a place. Agents on 8 prefill and 8 decode nodes whose pools hold a
quarter of what is asked (`bench.agents.simulated`) would gain nothing: reservations hold 0.4 % of
the decode nodes' blocks in the mean, no plan lacks blocks for one, and the way to the ticket is
1.1 % of the times to the first token of the last turn. With decode pools larger by that 0.4 %,
0.728 and 0.725 of the prompts are found instead of 0.729 and 0.725 (two seeds). It costs something
where a pool holds two prompts: of ten simulated agents on 2 and 2 nodes, the wait for tickets is
half of the last turn's time, and reservations hold 18 % of the blocks. Decode pools larger by a
fifth, so that what reservations hold is there beside, lower that turn's median from 0.33 to 0.25 s;
four times the memory on all nodes lowers it to 0.17 s. A prompt that is computed without a ticket
would have its first token sooner, and its second one would wait in its place.
"""
