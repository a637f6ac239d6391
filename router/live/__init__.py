"""The live page at `/` and its data.

feed            one sample a second, the same bytes for every viewer
reading         the cluster at one moment
history         the last minutes, one sample a second
counter_window  recent rates of counters
snapshot        reading and history as JSON
described_events  its events as JSON schemas, for `/openapi.json`
page/           the page itself: HTML, CSS and JavaScript
"""
