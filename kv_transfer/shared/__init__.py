"""What the sending and the receiving machine have in common, pure.

limits        every bound
lanes         names of the lanes and of the ways to verify
handshake     the states of both sides, as one table
effects       what the effects of both machines name: a peer, an event
deadlines     times at which something is to be looked at
block_arrays  numbers of blocks as arrays
pool_shape    where the pieces of a pool or a ring are
ring_slots    the slots of a ring, lent in order
chunks        pieces gathered into frames; which pieces are done
"""
