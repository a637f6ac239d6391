"""Grammars that are hostile, slow to compile or of a tiny vocabulary, and schemas of answers.

hostile_grammars  grammars that would take unbounded time or memory
patient_trials    trials whose time is the processor's, for machines that are busy
printable_tokens  grammars over the vocabulary of the tiny checkpoints
schemas           JSON schemas, and the check that an answer follows one
slow_compiler     compilations that last until a test lets them end
"""
