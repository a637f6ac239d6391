"""Clusters of real processes: real roles, a real Redis, real sockets.

api           an HTTP client that knows the API's answers
books         what nodes and the store hold, and the check that it is nothing
cluster       processes that form one cluster
compilations  a process that prints which kernels it compiled
forked_serve  processes that are forked from one that has imported what they need: roles above all
frozen        leaves what a template has made out of collections of garbage
grpc_of_nodes, grpc_of_routers   set gRPC up when they are imported
kernels_of_nodes   loads the kernels of nodes when it is imported
memory        what a process takes of the machine's memory
processes     one `pdserve serve` process
serving_up    `pdserve up` in a process of its own
slow_serve    the same, whose steps take a while
topologies    clusters that several test files use
watching      requests beside an attack, and how long each stood still
"""
