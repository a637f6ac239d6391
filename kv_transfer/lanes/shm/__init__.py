"""The lane between nodes of one host: the receiver copies out of the sender's pool.

shared_pool   a pool that other processes can read: made here, found and checked there
huge_pages    mapping that memory with large pages
shm_lane      both ends of the lane
"""
