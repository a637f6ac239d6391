"""The KV plane in histories: the real machines of `kv_transfer`, on a modelled network.

wires    connections between nodes, which break
end      one node's connector: its machines and their effects
moving   types of the modules that move bytes; pieces that landed are compared with those sent
copies   bytes that follow their header, or that the receiver copies out of the sender's memory
ring     blocks that pass through a ring, from which other nodes read by RDMA
written  blocks that the sender writes by RDMA
flights  reads and writes of other nodes' memory, in progress
pieces   what becomes of the pieces of transfers is counted
batches  reads or writes between two nodes, in order

Decisions:

Memory is read and written at some moment within a read or a write, even after the process that
began it has stopped: a network card serves the memory of a frozen process, and bytes that are on
their way arrive although their sender is dead, or was told that its write has failed. Only at an
address that was removed nothing is written.
"""
