"""Sessions of agents: long prompts of which most was seen before, turn after turn.

sessions    what agents ask: a generator with documented distributions
playing     plays sessions on a running cluster, all at a time
processes   the CPU time of a running cluster, and nodes of it that are replaced
tiers       where nodes found what they did not compute
traced      the requests of a trace, scaled
simulated   sessions on a simulated cluster of 16 nodes
figures     times by turn, tokens computed, and ratios between ways to set up a cluster
"""
