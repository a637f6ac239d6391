"""A cluster on a virtual clock, made of the code that serves.

cluster       a router, nodes, their network and the store's listing, and a run of requests
router        a real request flow for each request, real placement and membership
node          a real step loop, flow and scheduler
execution     steps that take their time on the virtual clock; runs of equal ones at once
drawing       the tokens of a model that is not there
kv_network    connectors over a modelled network
shared_links  how long bytes take on links that flows share: pure
timeline      the virtual clock and its heap of events
step_cost     the time of a step by a roofline, for replays that compare policies
shared_pool   what one pool for the whole cluster would find: pure
profile       a device with a model on it, from a file of `pdserve profile`; profiles/: those that
              come with this, and the time of a step by measured points
trace_file    published traces of requests; generated_trace: conversations that are made up
clients       a trace's requests as a cluster sees them
faults/       histories with faults: processes, networks, clocks and the store break, all is checked
replays/      what real processes decided, decided again from their recordings
served        what became of requests, and the figures of all of them

Decisions:

What decides is the code that serves: placement, flows, ledger, scheduler and planner, and the step
loop that drives them. What takes time is modelled: a step, a message, bytes on a network. What is
computed is not: tokens are made up, and KV has no content. A second scheduler written for planning
would be wrong where this one changes.

One heap orders everything, and one seed decides what is random. Two runs are the same to the last
bit. What happens at the same moment happens in the order in which it was caused, and the turn of a
node comes last: what arrives when its step ends is in that turn.

A run of equal steps is one event, and one more for each block that is full in it. Its end is known
when it begins, unless something reaches the node; then it ends with the step that runs at that
moment, as it would have without the jump. A block that is full is published at its moment, and its
sequence gets the next one, because both change what others find; all else that the planner would
have done for each step is done at the end. So a jump is an optimisation and not a model. Only the
times at which a router hears of the tokens in between differ, and it takes those from the run.

What router and nodes make of the same prompt, its words and the hashes of its blocks, is made once
for all of them (`common/kv/prompt_blocks.py`): they are one process here.
"""
