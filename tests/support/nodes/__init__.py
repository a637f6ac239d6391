"""One node in the process of the test, and a router's stream to it.

control_server  the control service, with an inbox that answers by itself
drained_node    a node that is drained while a router asks it
fluid_cluster   nodes that report what flows through them
listed_nodes    what a router knows of nodes that are heard, or in the store
node_caller     a router's stream to a node
node_outputs    outputs of nodes
node_records    records of nodes in the store
node_views      nodes as placement sees them
recorded_placing  the placement of a router that is asked and recorded
running_node    a whole engine node over a hash runner
timed_pulls     pulls that a node has made, one after the other
"""
