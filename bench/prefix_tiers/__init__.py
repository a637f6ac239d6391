"""Times to a first token, by where the start of a prompt is: computed, cached here, or elsewhere.

in_one_engine  computed, in the pool, in host memory, in files
pulled         in the pool of another node
from_files     in the files of another node
"""
