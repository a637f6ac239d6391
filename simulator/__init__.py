"""A cluster on a virtual clock, which runs the code that serves.

cluster       a router, nodes, their network and the store's listing, and a run of requests
router        a real request flow for each request, real placement and membership
node          a real step loop, flow and scheduler
execution     modelled steps on the virtual clock; runs of equal ones at once
drawing       the tokens that steps draw without a model
kv_network    connectors over a modelled network
shared_links  how long bytes take on links that flows share: pure
timeline      the virtual clock and its heap of events
step_cost     the time of a step by a roofline, for replays that compare policies
shared_pool   prefix hits of one pool for the whole cluster: pure
profile       a device with a model on it, from a file of `pdserve profile`; profiles/: files that
              come with this, and the time of a step by measured points
trace_file    published traces of requests; generated_trace: conversations drawn from a seed
clients       a trace's requests as a cluster sees them
faults/       histories with faults: processes, networks, clocks and the store break, all is checked
replays/      decisions of real processes, made again from their recordings
served        times and outcomes of requests, and the figures of all of them

Decisions:

Decisions are made by the code that serves: placement, flows, ledger, scheduler and planner, and the
step loop that drives them. Durations are modelled: of a step, a message, bytes on a network.
Results are not: tokens follow from the request's seed, and KV has no content. A second scheduler
written for planning would be wrong as soon as the real one changes.

One heap orders all events, and one seed decides all that is random, so two runs are the same to the
last bit. Events of the same moment are handled in the order in which they were caused, and the turn
of a node comes last: messages that arrive when its step ends are in that turn.

A run of equal steps is one event, and one more for each block that is full in it. Its end is known
when it begins, unless a message reaches the node; then it ends with the step that runs at that
moment, as it would have without the jump. A full block is published at its moment, and its sequence
gets the next one, because both change what other requests find; the rest of the planner's work for
these steps is done at the end. So a jump is an optimisation and not a model. Only the times at
which a router hears of the tokens in between differ, and it takes those from the run.

The words of a prompt and the hashes of its blocks are computed once for the router and all nodes
(`common/kv/prompt_blocks.py`): they are one process here.
"""
