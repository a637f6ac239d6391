"""What a decision of the scheduler costs: `python -m bench.scheduler`.

overlap     the period of a node's steps on a device, planned one after the other or ahead
local_node  a node alone, which computes its prompts
"""
