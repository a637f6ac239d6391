"""Roles that follow the load, as with `--auto-roles`: the real controller of each router.

cluster_roles  the controllers of all routers of a cluster, and what must hold of its roles
role_turns     the turns of one router's controller
drawing        clusters whose roles follow the load, and cuts between routers and store: pure
"""
