"""What a router has learned of its nodes from their reports and from its own placements.

member          a node of the membership: its last report, whether it is heard, what it was sent
member_effects  what follows from an event of the membership
node_view       a node as a choice sees it
roster          the nodes that can be chosen, by what a request may ask of them
sessions        which nodes served each session last
block_index     which nodes hold which blocks
block_reports   what nodes report of their blocks, in order
changes         changes of roles, and nodes that leave, as far as only this router knows of them
pair_health     which pairs of nodes fail to hand off, and when each is tried again
"""
