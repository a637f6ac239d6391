"""Grammars that are hostile, slow to compile, or schemas that an answer is checked with.

hostile_grammars  grammars that would take unbounded time or memory
schemas           JSON schemas, and the check that an answer follows one
slow_compiler     compilations that last until a test lets them end
"""
