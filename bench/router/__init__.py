"""The cost of a router: its own CPU time, its latency and its memory: `python -m bench.router`.

load           streaming clients that cost little
node_stand_in  a prefill and a decode node that answer at once
processes      pinned processes and what they use
planning       how long a body stops the event loop
many_nodes     what a request costs a router that hears many nodes
idle_nodes     nodes that are heard and get no request
idle_streams   what their open streams cost
wide           what the number of nodes costs
block_index    what it costs to know what nodes hold
"""
