"""Profiles: `*.json` that come with the simulator, and times that follow from a measured one.

measured_steps  the time of a step, by measured points
beside_steps    the time of a node and its router beside the steps of the model
shared_cores    the ends of steps whose nodes share the cores of one machine: pure

`tools/generate_profiles.py` writes the files.
"""
