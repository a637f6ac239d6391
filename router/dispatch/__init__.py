"""Request flows on real nodes: effects become calls, replies and tokens become events.

dispatcher          starts, feeds and ends the flows
running_choice      one choice in progress, with its timers
node_calls          calls to nodes on behalf of a request
unsent_calls        calls and aborts that wait to be sent
waiting_calls       calls that wait for a reply, each with its deadline
node_clients        the router's end of one node: one stream, both ways
node_listener       what that end tells its owner
fairness            how much of a burst of outputs is passed on before others have a turn
silence             when a node has been silent for too long
echoes              whether what is sent to a node arrives there
pings               whether the process of a silent node still runs
pair_placer         placements that avoid pairs of nodes whose handoffs fail
node_pool           the nodes of the cluster: membership, and one client per member
placement_recorder  placements written to the store, beside the data path
"""
