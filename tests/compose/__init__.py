"""The images and compose files of `compose/`, built and run on a real Docker engine.

engine        a running Docker engine: the machine's own, or one started for the tests
base_images   the base images of the builds: pulled, or stand-ins where no registry is reachable
compose_cli   the commands of both generations of Compose
project       one compose project on that engine
cluster       that project as a cluster of routers, nodes and Redis
load          continuous requests, none of which may fail
stranger      connection attempts without keys; runs inside a container
"""
