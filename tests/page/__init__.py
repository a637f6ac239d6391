"""The live page in a real browser.

browser     a headless Chromium, driven over a pipe
test_…      what a person would look at
__main__    installs Chromium where that is possible, then runs the tests
"""
