"""Placement as a whole: what decides where requests go, as it is made, told and recorded.

placing  both machines that it consists of, from their settings: membership and chooser
chooser  which nodes each request gets, by the cluster and the requests before
"""
