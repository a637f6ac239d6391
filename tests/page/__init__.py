"""The live page in a real browser.

served_edge        the page over scripted engines
test_page          what a person would look at, over scripted engines
test_real_cluster  the same over processes that start, fall silent and return
__main__           installs Chromium where that is possible, then runs the tests
"""
