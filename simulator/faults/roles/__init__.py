"""Roles that follow the load, as with `--auto-roles`: the real controller of each router.

cluster_roles  the controllers of all routers of a cluster, and what must hold of its roles
role_turns     the turns of one router's controller
leading        the store's lease of the router that decides, and the last change of a role: pure
store_calls    what a router asks of the store, on a path that may be cut
drawing        clusters whose roles follow the load, and cuts between routers and store: pure
"""
