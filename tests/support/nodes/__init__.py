"""One node in the process of the test, and a router's stream to it.

control_server  the control service, with an inbox that answers by itself
node_caller     a router's stream to a node
running_node    a whole engine node over a hash runner
"""
