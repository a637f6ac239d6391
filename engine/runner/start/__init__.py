"""From a configuration to a runner: what is checked, chosen, measured and built at the start.

load            from a configuration to a runner
choose          which back end computes
assemble        from checked files and a back end to a runner
compile_progress  logs how far that is
profile_step    computes the largest step
cache_size      how many blocks the cache has
"""
