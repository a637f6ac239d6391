"""Request flows on real nodes: effects become calls, replies and tokens become events.

dispatcher          starts, feeds and ends the flows
flow_calls          what a flow asks for: nodes of the chooser, work of nodes, records
running_choice      one choice in progress, with its timers
node_pool           the nodes of the cluster: membership, and one client per member
missing_nodes       why no node can finish an answer
client/             the router's end of one node
liveness/           whether a node lives, and gets what it is sent
handoff_watch       which handoffs work, as outputs show: for placement, metrics and the log
placing_recording   placement as it is recorded, so that it can be replayed
between_nodes       what nodes say to each other through this router
placement_recorder  placements written to the store, beside the data path

Decisions:

A node that is heard may not be reached. Where a network loses one direction alone, tokens and
heartbeats go on arriving, and calls get no reply. So the router sends a number twice a second on
the stream, and the node repeats the latest one in its messages (`liveness/echoes.py`). A node that
is heard and has not repeated a number for 1.25 s is suspected (`liveness/pace.py` says how this
changes with many nodes): nothing new is placed on
it, and requests that wait for its first word begin a second attempt. Answers that run there go on,
because their tokens arrive. The pings do not show this: without keys gRPC counts a connection as
open before the node has received anything on it, and a ping that is lost only opens another one. A
node of the release before repeats nothing, and is not judged.

A connection may be dead and neither end know it: a firewall that has restarted drops its packets,
and after a cut TCP tries again about as late as the cut was long. gRPC would open every further
stream on it, for up to a quarter of an hour. So where a stream brings no word for 5 s, the next one
gets another connection. The first one after a silence does not: a process that was stopped goes on
with the connections that it has, and answers at once.

A busy node is not a silent one. Heartbeats come from the node's event loop, which a long call can
block, in Python or with the interpreter lock held. A router therefore pings each node twice a
second over a second connection (`liveness/pings.py`). gRPC's own threads answer whatever Python
does; a process that is stopped answers nothing. A node that answers is suspected after 3 s
instead of 1.25 s. A new connection would show the same without keys, but the TLS handshake of
`--keys` requires the node's Python code. Nodes of protocol version 2 are not pinged: they close a
connection with so many pings.

Many nodes are asked as often as a request needs it. What silence costs is the time of the requests
on the silent node. So of many nodes one without a request of this router is asked every 9.75 s, is
not pinged, and its silence counts from a question on. The message that places a request on it asks
it too, and from there on it is judged as if it had had requests all the time: the request waits no
longer than one on a node that dies under it. What is lost is that such a node, if it is silent, can
still be chosen for 12 s instead of 2 s; where the placement store answers, about as long as its
lease lasts, because one whose lease has ended is asked often. A request that meets it goes on
elsewhere after 2 s. It would meet a second one if many fell silent together, so the first one that
is suspected has all others asked. A node decides nothing of this: it repeats numbers and
keeps to the silence that it was allowed, so nodes of the release before, which allow themselves
2 s, only speak more often.

Numbers are not replaced by pings of HTTP/2, which cost less: these show that a process runs, and
neither that its event loop does nor that what was sent arrived.

Tokens that arrive together are sent together, and first tokens overtake them. The router sends all
ready events of an answer with one call. It handles a node's large message in parts, and between the
parts new requests and first tokens are handled. A saturated router therefore delays tokens that
follow others, not first tokens. `docs/router_cost.md` states the cost.
"""
