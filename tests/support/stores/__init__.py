"""Placement stores: real Redis servers, and one in memory.

memory_store      the reference store
redis_server      a real Redis server on a free port
redis_topologies  a Redis Cluster, and a Redis with a replica and Sentinels
refusing_redis    every way in which Redis refuses writes
"""
