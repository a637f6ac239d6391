"""Roles that follow the load, as with `--auto-roles`: the real controller of each router.

role_turns  the turns of one router's controller
leading     the store's lease of the router that decides, and the last change of a role: pure
store_calls what a router asks of the store, on a path that may be cut
books       what must hold of roles
drawing     clusters whose roles follow the load, and what may break between router and store: pure
"""
