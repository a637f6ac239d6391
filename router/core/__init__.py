"""The router's decisions without I/O: events and `now_s` in, effects out.

request_flow   the machine of one choice: which node is asked for what, and its one outcome
flow_actions   what that machine does on its events: asks nodes, gives up attempts, ends
attempts       its attempts: their nodes, what is open there, their tokens, which go on
candidates     which nodes it may still ask, and whether it waits where there is none
token_ledger   the tokens of an attempt's nodes in one order, each index once
effects        what a flow asks its shell to do
ttft_stages    where the time to the first token went
membership     which nodes are alive, from the store and from the nodes' streams
counted_legs   which of these effects count on a node, and how many tokens of a prompt
held_load      what a node holds now, from its last report and what was sent to it
placement      which nodes take a request: filter, score, pick; by what earlier requests taught, too
prefix_sources what has more of a prompt than the prefill node that is chosen for it
shortlist      which nodes of a wide cluster a choice looks at
known/         what is known of nodes: those that can be chosen, blocks, sessions, pairs that fail
policies/      placement policies by name
scaling/       how many nodes of each role the load wants, and which node changes its role
generation     the seam between the HTTP edge (text) and dispatch (nodes)
cluster_view   the seam between the HTTP edge and the cluster behind it

Decisions:

Failures count from the last token on (`router/core/candidates.py`). A limit over the life of an
answer would end long answers of clusters that lose nodes now and then. A request that makes no
progress is what may harm nodes: after three lost nodes without a token no other node is asked,
unless one of these is heard again.

An answer waits for a node until its deadline. Its client has part of it already, and a node that
restarts or is heard again can continue it. Also a router that stood still needs this: its nodes
have cut all its streams, and are all heard again within a second. New requests wait for two seconds
only, because another router may have nodes. Where only nodes are left that are too short for it, an
answer for which the client set no limit goes on up to the length of the longest one, as that of a
new request would. Any other one waits a minute for a longer node: one that restarts is mostly back
by then, and what nobody serves is worth no longer wait.

A choice in a wide cluster looks at some nodes (`router/core/shortlist.py`), and at all where these
will not do, so that it costs the same with a hundred nodes and with a thousand. Which nodes can be
drawn is kept as nodes change (`router/core/known/roster.py`) and not found out for each request.
One code filters and picks in both cases, and a plain list of nodes is always looked at whole: what
small clusters do is what tests compare wide ones with (`tests/simulation/test_wide_clusters.py`).

A prefill node's leg counts from its choice on, not from the reply to the reservation. Otherwise a
burst would be sent to one prefill node before the first reply.

Of a report, a router corrects its own part. A node's report is up to 2.5 s old when a request is
placed by it: a heartbeat and a listing of the store. A router knows what it sent and what has
ended, so it takes of a report the part of other routers as it is (what exceeds the most that it had
there itself since the last listing but one), and of its own part what still runs
(`router/core/held_load.py`). Prompts count on prefill nodes with their tokens and blocks, from the
choice on. Otherwise prompts that have ended would count in blocks and queued tokens, each as much
as some ten new requests, and bursts half a second apart would go wholly to the node that reported
at another moment (`tests/simulation/test_bursts.py`). With several routers the part of the others
is as old as the report.

A prompt counts whole on the node that computes it, though of agents' prompts most is cached there.
Where only what the node lacks counts, about as much is computed and prompts wait longer. Of agents
on 8 prefill and 8 decode nodes (`bench.agents.simulated`, two seeds, pools whole and a quarter, and
four times the load) the mean time to the first token was 0.5 to 4.7 % longer, with host memory 4.4
to 9.1 %, with named sessions 3.5 to 12.8 %. On 16 mixed nodes it was 2.7 % shorter to 6.4 % longer,
with named sessions 6.9 % either way. Where half of what is cached counts, it was 1.0 % shorter to
1.2 % longer, and 0.8 to 5.3 % longer with named sessions. A tenth of the network's speed turns it
round where pools are whole: 8.6 and 10.3 % shorter, and p99 15 and 22 %; but 6 % longer with named
sessions, and with a quarter of the pools 1.7 % longer and 3.0 % shorter. So no one share is right.
Prompts that repeat nothing are served alike.

An answer is continued, not repeated. After a node is lost, the next nodes receive the prompt and
the tokens that the client has read. They compute both in one prefill. Drawing these tokens again
would give the same result, as slowly as the first time. What is long enough for a handoff when it
is new is long enough when it is continued: several continuations would otherwise be computed one
after the other on the surviving decode node, beside its decodes. Token n takes the place of token 0
then, and the commit's number of tokens says where the answer stands. Nodes that drain and nodes
that die take the same path.

A session is kept together before the policy is asked (`router/core/policies/session_nodes.py`), and
not as one more term of a score: so it is with every policy, and a request without a name costs
nothing. What it may wait for is bounded by what it saves: the tokens of its last prompt on a node
that computes prompts, and half of the seats anywhere. It is recorded when nodes are chosen, not
when they answer, so that requests of a new session that come at once go together.

A prefix counts with its tokens, not with its share of the prompt. A share would be worth as much
for every prompt that begins with one system prompt, and the node that had the first of them would
get all others until its seats are taken (`tests/simulation/test_shared_prefix.py`).

Nodes report what their prefix caches hold, and host memory behind them
(`node/control/block_reports.py`), on the stream that they have: all when it opens, then what
changes. A block counts alike in each of these tiers. Copying a prefix back from host memory takes
less than a hundredth of computing it (`docs/figures.md`), so the load of the nodes decides between
one that has it in its pool and one that has it there. So several routers know the same without
talking, and one that starts knows it at once. What a router has placed itself it expects
(`router/core/known/block_index.py`): the next request of a burst comes before the first report, and
nodes of an earlier release report nothing. A report that is missing voids all of the node, because
a prefix that seems to be there costs more than one that seems not to be.

A pair that fails is avoided, not its nodes. When KV does not get from one prefill node to one
decode node, the router cannot know which of them is at fault, and each may serve well with others.
It avoids the pair (`router/core/known/pair_health.py`) for 1 s, after the next failure for 2 s, and
so on up to a minute, and prefers decode nodes that have no such pair. When every pair fails, the
decode node computes the prompt itself. After the pause one attempt tries the pair. The prefill node
also refuses transfers to a decode node that does not answer, so this attempt does not wait.

A member that is heard stays. The store introduces nodes to routers. That a node is alive, a router
hears on its stream, so neither a store that is away nor one that lists no node removes a node: a
store that refuses writes (full memory or disk, lost replicas, a replica after a failover) answers,
and every lease in it ends. A node leaves by ending its stream, or is replaced by a newer
incarnation. Only where nothing is heard does the store decide.
"""
