"""From a configuration to a running role: the composition roots.

run_role      what all roles share: logs, signals, keys, checkpoint, placement store
start_check   what `check-config` checks beside the settings
usable        what a role could not use of this machine
router_role   the router
engine_role   a prefill, decode or mixed node
kv_plane      a node's KV connector: memory, lanes, keys
certificate_watch   a renewed certificate is taken over; a warning before the end
make_tracing  traces, where they are on
otel          traces by the OpenTelemetry SDK
shutdown      how a role is told to end: in order, or at once
file_limit    the limit of open files, raised for connections
process_limits  limits of threads and memory, told in words
"""
