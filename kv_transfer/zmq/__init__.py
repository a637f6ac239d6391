"""Nodes on different machines: a connector on ZMQ sockets.

connector    ZmqConnector
transport    its sockets; readiness: which of them have something to read
first_tries  how the first try to connect to a peer ends
parts        payload that ZMQ sends out of this process's memory
gate         authentication of connections when the cluster has a key
curve_keys   the key pair that encrypts them
endpoints    KV addresses as text; name_lookup: host names, resolved in other threads
open_files   how many files are left; without any, a port would spin
wake_up      wakes the connector's thread: free while it is awake
"""
