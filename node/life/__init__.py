"""How a node starts, lives and ends.

engine_node       a running node: its parts made in order, supervised, stopped in reverse order
node_parts        the concrete parts of a node and their contracts
make_flow         the flow of the node's role
request_path      control service, inbox, step thread and token streams, connected
step_thread       the step loop in its thread, until a stop, a crash or a stall
connector_watch   whether the KV connector's thread makes turns
lease_keeper      the node's lease in the placement store
step_recording   what the flow is told and decides, in a file
recorded_steps   how a recording shows requests, results and plans
model_loading     waits at the start that a stop ends
make_scheduler    the scheduler that a configuration asks for
prefix_disk       the node's files of prefixes
possible_roles    the roles that it can be given while it runs
self_description  the node's record in the placement store, its limits and its log lines

Decisions:

Every node is started able to do the work of every role, without a setting for it: both ends of the
KV transfer, drafts as configured, a pool that others on the host may read. That takes no memory of
its own. Two things would: steps with prompts on a decode node with `local_prefill_threshold` 0, and
`swap_space` on a prefill node. The former keeps its role, the latter recomputes what it preempts as
a decode node.
"""
