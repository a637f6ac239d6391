"""Profiles: `*.json` that come with the simulator, and what follows from a measured one.

measured_steps  the time of a step, by measured points
beside_steps    what a node and its router take beside

`tools/generate_profiles.py` writes the files.
"""
