"""A node whose process stops, freezes and restarts, and everything in it.

faulty_node  the simulator's node on real blocks, with a stream to each router
life         its lease, its role, and its drain
steps        steps whose tokens depend on every block that they read
hanging      steps that hang while the rest of the process goes on
copies       copies of blocks beside the steps, as on a device
disk         files of prefixes, which outlive the process
"""
