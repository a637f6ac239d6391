"""A cluster on one card, as a client sees it: what `tests.gpu.cluster_on_card` runs.

shapes      models of public shapes, and what is asked of them
streams     an HTTP client that takes little time from what it measures
clusters    the clusters of one shape: prefill and decode apart, and one mixed node
phases      what is checked and measured
"""
