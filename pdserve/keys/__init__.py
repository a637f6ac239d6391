"""Certificates, KV keys, Redis users and API keys of a cluster.

keys_command      `pdserve keys`
keys_init         the keys of a cluster as a folder
certificates      the cluster's certificate authority
redis_acl         Redis users and what each may do
api_keys_command  `pdserve api-keys`

Decisions:

A certificate names a kind of process, not a machine. Nodes scale, move and restart under other
addresses, and a certificate for each would need an issuer that is always available. The names state
what matters, which is who may command whom: a node accepts commands from routers, a router accepts
tokens from nodes, and TLS checks it. The price is that a stolen node folder is as good as a node
until the CA is replaced.

Keys are tested at the start. A process performs a TLS handshake with itself in memory before it
listens. An expired certificate, one of another CA or another role, or a key that does not match
gives one error message and exit code 2.
"""
