"""A rolling upgrade: processes of the previous release beside those of this one, under load.

`release` takes the previous release's sources out of the repository's history, `rollout` says what
is replaced in which order, `handoffs` records which nodes were paired, `report` judges and counts.
Run `python -m tests.upgrade --help`.
"""
