"""Profiles: `*.json` that come with the simulator, and what follows from a measured one.

measured_steps  the time of a step, by measured points
beside_steps    what a node and its router take beside
shared_cores    the ends of steps whose nodes share the cores of one machine: pure

`tools/generate_profiles.py` writes the files.
"""
