"""What requests want of the nodes of one cluster, and when nodes may refuse them.

drawing         what is drawn of it: how much nodes queue and hold, and how soon answers are wanted
watched_router  the simulator's router, which looks into requests that end for want of room
refusals        which nodes refused a request, and whether it may end for that: pure
lengths         how long requests may be, and answers that are cut: pure
grammars        how long a node compiles a grammar, and what comes of it: pure
salts           whose KV a request may use: pure
simpler         a history with one demand less, for one that is shortened: pure
waiting         what a node may refuse, and how many requests may wait there: pure
"""
