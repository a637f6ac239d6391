"""What every engine node is around its scheduler: control service, router streams, lease, wiring.

messages        what reaches the step thread, and what it wants done: plain values
request_book    who asked for what, until when (pure)
performer       carries out what it wants done
inbox           the bounded door into the step thread
control_service gRPC ⇄ values
router_calls    the calls on one router's stream, each answered once
output_streams  one token stream per router
lease_keeper    the node's lease in the placement store
make_scheduler  the scheduler that a configuration asks for
metrics         the node's statistics as Prometheus samples
metrics_server  these over HTTP
model_loading   a load that a stop need not wait for
step_thread     the step loop in its thread, until a stop or a crash
watchdog        a step that does not end
engine_node     a running node made of these parts
"""
