"""Replays of request traces through the scheduler, on a virtual clock.

replay      one replay
rows        the compared policies
load        pool sizes and arrival rates
comparison  every row on every trace, pool and load
figures     figures of one replay
tables      figures as Markdown
pictures    figures as SVG
"""
