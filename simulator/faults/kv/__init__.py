"""The KV plane in histories: the real machines of `kv_transfer`, on a modelled network.

wires    connections between nodes, which break
end      one node's connector: its machines, and what they ask for
moving   what the parts that move bytes share, and what they see of their end; pieces that
         landed are compared with those sent
copies   bytes that follow their header, or that the receiver copies out of the sender's memory
ring     blocks that pass through a ring, of which other nodes read by RDMA
written  blocks that the sender writes by RDMA
flights  reads and writes of other nodes' memory, under way
batches  what is moved from or to one node, in order

Decisions:

Memory is read and written at some moment within a read or a write, whatever became of the process
that began it: a network card serves the memory of a process that stands still, and bytes that are
on their way arrive although their sender is dead, or was told that its write has failed. Only an
address that was removed lets nothing through.
"""
