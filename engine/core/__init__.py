"""Scheduling without I/O: sequences, blocks, plans. No clock, no thread, no framework."""
