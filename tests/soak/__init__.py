"""A soak: a real cluster under mixed load, with one random fault every few seconds.

`schedule` draws the faults, `injection` performs them, `links` are the networks that can be cut,
`questions` are what is asked, `clients` ask and compare, `report` counts. Run
`python -m tests.soak --help`.
"""
