"""The lane between two processes' cards: the receiver copies out of the sender's memory.

descriptors  how the sender's memory gets to a receiver: a descriptor over a Unix socket
ipc_lane     the lane
"""
