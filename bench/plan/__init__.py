"""`pdserve plan`, measured: `python -m bench.plan` takes its time.

many            a cluster of many nodes, simulated
accuracy        how far plans are from real clusters
stages          times of a request by stage, planned and real
errors          figures of these differences
recorded_steps  steps that nodes ran, and what a profile says of them
machine_speed   how fast the machine was, over time
"""
