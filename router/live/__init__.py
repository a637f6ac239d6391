"""The live page at `/` and what feeds it.

feed            one sample a second, the same bytes to everyone who watches
reading         the cluster at one moment
history         the last minutes, one sample a second
counter_window  how fast counters rose lately
snapshot        reading and history as JSON
page/           the page itself: HTML, CSS and JavaScript
"""
