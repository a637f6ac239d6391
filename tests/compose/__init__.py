"""The images and compose files of `compose/`, built and run on a real Docker engine.

engine        an engine that answers: the machine's own, or one started for the tests
base_images   the images that ours are made from: pulled, or stand-ins where no registry answers
compose       one compose project on that engine
load          requests that never stop, and none of which may fail
"""
