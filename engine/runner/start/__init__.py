"""From a configuration to a runner: what is checked, chosen, measured and built at the start.

load            from a configuration to a runner
assemble        from a checked checkpoint to the parts of a runner
arithmetic      what products are computed in, for the fingerprint
cpu_settings    what a machine without a GPU refuses, checked first
common_kernels  compiles the kernels that every model needs, divided among the nodes of a machine
compile_progress  logs how far that is
profile_step    computes the largest step
memory_meter    the memory that it takes
cache_size      how many blocks the cache has
"""
