"""What a prefill node pays for the number of decode nodes: `python -m bench.fanout --json`.

prefill_end     the prefill node's connector in a process of its own
decode_ends     the machines of many decode nodes on real sockets
decode_machine  the receiving machine of one of them, which takes every byte
simulated       the machines of both sides without a network
workload        small handoffs
"""
