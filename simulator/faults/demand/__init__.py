"""Demands of requests on the nodes of one cluster, and when nodes may refuse them.

shares          how often histories have each of their parts: pure
drawing         demands from a seed: how much nodes queue and hold, how soon answers are wanted
watched_router  the simulator's router, with a check of requests that end for want of room
refusals        which nodes refused a request, and whether it may end for that: pure
lengths         how long requests may be, and answers that are cut: pure
grammars        how long a node compiles a grammar, and what comes of it: pure
salts           whose KV a request may use: pure
simpler         a history with one demand less, while it is shortened: pure
waiting         when a node may refuse a request, and how many may wait there: pure
"""
