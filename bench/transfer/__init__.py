"""How fast KV blocks get from one process into another on this machine; see `__main__`.

ways            the compared ways, each as two ends
connector_ends  the connectors of nodes
plain           a bare socket, and a copy within one process
mooncake_tcp    Mooncake's Transfer Engine over TCP
push_calls      how long a push keeps the thread that runs steps
workload        the same bytes for all, in two patterns
processes       two ends in processes of their own
process_costs   memory and CPU time of a process
"""
