"""KV transfer: connectors of every kind, lanes and networks in memory, proxies that break one.

fake_engine          a transfer engine in memory
fake_late_lane       a lane whose copies are completed later
fake_one_sided_lane  RDMA in memory
fault_proxy          a proxy that does one thing wrong, at one byte
kinds                the kinds of connector that the contract suite runs over
kv_cluster           nodes on one network, over each connector
kv_relay             a decode node that names a relay as its KV endpoint
links                proxies that cut, delay or throttle
loopback_connector   the reference connector: a network that loses nothing
many_peers           a sending machine with many receivers
pool_shapes          pools that are described by their numbers alone
receiver_events      a receiving machine, and the events of one sender
sender_events        a sending machine, and the events of one receiver
tcp_proxy            the common part of the proxies: sockets and threads
"""
