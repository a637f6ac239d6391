"""Profiles: `*.json` that come with the simulator, and what follows from a measured one.

measured_steps  the time of a step, by measured points

`tools/generate_profiles.py` writes the files.
"""
