"""What every engine node is around its scheduler: control service, router streams, lease, wiring.

engine_node       a running node: its parts made in order, supervised, stopped in reverse order
node_parts        the concrete parts of a node and their contracts
request_path      control service, inbox, step thread and token streams, connected
node_flow         the node's decisions around its scheduler (pure): messages in, effects out
flow_limits       which requests a node could never answer (pure)
messages          messages to the step thread, and the effects that it wants (pure)
current_load      the node's load as routers see it (pure)
copies_under_way  copies of KV blocks, and what follows their ends (pure)
shedding          when a queued request would end, and whether that is too late (pure)
attempt_table     the attempts on a node: who asked for them, until when (pure)
attempt_outputs   what a node says in a router's stream about an attempt (pure)
ignored_priorities  says once that priorities of requests do not count here
tickets           tickets of decode nodes, to and from the wire
connector_watch   whether the KV connector's thread makes turns
step_progress     whether steps end, by how long they usually take (pure)
step_thread       the step loop in its thread, until a stop, a crash or a stall
perform_effects   performs the effects that the step thread wants
inbox             the bounded queue of messages to the step thread
control_port      the gRPC port and its bounds
control_service   gRPC messages to values and back
router_calls      the calls on one router's stream, each answered once
output_streams    one token stream per router
lease_keeper      the node's lease in the placement store
drain             leaving in order
model_loading     waits at the start that a stop ends
make_scheduler    the scheduler that a configuration asks for
self_description  the node's record in the placement store, its limits and its log lines
attempt_watch     attempts that ended, as log lines and spans
attempt_spans     the spans of an attempt
metrics           the node's statistics as Prometheus samples
kv_metrics        the KV connector's statistics as Prometheus samples
grammar_metrics   what following grammars takes, as Prometheus samples
memory_metrics    what the node's memory is for, as Prometheus samples
metric_families   Prometheus families made from numbers
metrics_server    these samples over HTTP
"""
