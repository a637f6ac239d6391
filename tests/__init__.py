"""All tests; what several folders of them share is in `support`."""
