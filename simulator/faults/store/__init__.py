"""The store of a cluster: what it keeps, and what routers ask of it.

leases   who is alive, as far as the store was told: pure
leading  the lease of the router that decides about roles, and the last change of a role: pure
calls    what a router asks, on a path that may be cut
"""
