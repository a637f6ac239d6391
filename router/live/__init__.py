"""The live page at `/` and its data.

feed            one sample a second, the same bytes for every viewer
reading         the cluster at one moment
history         the last minutes, one sample a second; recent rates of counters
snapshot        reading and history as JSON
shapes          its events, for `/openapi.json`
live_routes     `/` and `/v1/live`
page/           the page itself: HTML, CSS and JavaScript
"""
