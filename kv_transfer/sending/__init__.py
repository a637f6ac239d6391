"""The sending machine of a handoff, pure: a prefill node's side.

machine           the machine; links: all links, their deadlines, and which may send now
link              one decode node; channels and further_channels: its connections
shared_window     the room that all links share
transfer          one handoff, how its chunks join to frames, and which one sends next
unreachable       decode nodes that did not answer; transfer_errors: how transfers end badly
effects           what the machine asks its connector to do
link_rates        which transfers are too slow
sent_slots        how long the slots of a sent frame are kept, where there is a ring

Decisions:

Each connection of a pair has a window of its own. Large frames keep Python's share small, and four
of them fill a window. With one window for all connections of a pair, two connections move hardly
more than one: 5.3 GB/s in place of 6.9. Smaller frames in the same window are slower still.

The prefill node decides what is slow, the router where to go. Only the sender sees the rates of its
links, and only the router knows which nodes have room. So a slow transfer ends with an error, as a
broken one does, and the router's next attempt avoids the pair. A first attempt alone is moved,
which needs no message from the router about whether there is another node: the second attempt
stays, however slow it is.
"""
