"""Measurements, one command each: `python -m bench.engine --json` prints one JSON line last.

engine/          the engine on a CPU: steps, draws, memory, and other engines beside it
quality/         what a model loses by fewer bits
scheduler/       what a decision costs
speculation/     what drafts gain
structured/      what grammars cost
transfer/        KV from pool to pool
handoff/         a prompt's KV to another node, beside steps of a device
fanout/          one prefill node and many decode nodes
prefix_eviction/ what is found again by which order of eviction
prefix_tiers/    prefixes in host memory, on disk and on other nodes
router/          a router: requests, bodies, idle nodes, what they hold
agents/          sessions of agents
plan/            `pdserve plan`: its time, and how far it is from real clusters
replay/          a trace through one node on a virtual clock
policies         policies of reservation compared by such replays
auto_roles       roles that follow the load
serving          a whole cluster on a trace
running_cluster  real clusters that others start and load
continuation     answers whose decode node is killed
local_prefill    when a decode node should prefill by itself
live_page        the live page
command          flags of these commands, and the figures that they print
remote           an object in a process of its own
amounts          numbers of command lines of which none can be nothing
"""
