"""Certificates, KV keys, Redis users and API keys of a cluster.

keys_command      `pdserve keys`
keys_init         the keys of a cluster as a folder
certificates      the cluster's certificate authority
redis_acl         Redis users and what each may do
api_keys_command  `pdserve api-keys`
"""
