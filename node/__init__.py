"""What every engine node is around its scheduler: control service, router streams, lease, wiring.

engine_node      a running node made of these parts
node_flow        the node's decisions around its scheduler (pure): messages in, effects out
messages         what reaches the step thread, and what it wants done (pure)
attempt_table    the attempts on a node: who asked for them, until when (pure)
tickets          the tickets that a decode node gives out
step_thread      the step loop in its thread, until a stop or a crash
perform_effects  performs the effects that the step thread wants
inbox            the bounded door into the step thread
control_port     where the control service listens
control_service  gRPC to values and back
router_calls     the calls on one router's stream, each answered once
output_streams   one token stream per router
lease_keeper     the node's lease in the placement store
drain            leaving in order
model_loading    a load that a stop need not wait for
make_scheduler   the scheduler that a configuration asks for
watchdog         a step that does not end
attempt_watch    attempts on this node as traces and log lines see them
attempt_spans    the spans made of them
metrics          the node's statistics as Prometheus samples; kv_metrics: those of its connector
metrics_server   these over HTTP
"""
