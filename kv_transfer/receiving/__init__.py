"""The receiving machine of a handoff, pure: a decode node's side.

machine        the machine
sessions       connected senders, what each may send; connections: how they begin and end
landings       all handoffs, with their blocks, and what is being copied; landing: one of them
quarantine     blocks that a sender may still write
slab_fences    how those of a dead sender come back
effects        what the machine asks its connector to do
lane_uses      when the lane of a session that is over may be closed
damaged        pieces that are asked for again

Decisions:

The open transfer renews the lease. A prefill node opens the transfer when it accepts the prompt, so
no timer has to exceed the longest queue. When the prefill node dies, its silence ends the lease.
"""
