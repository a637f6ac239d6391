"""Authentication and limits of clients.

middleware        around every request: its id, its path, its API key, its limits
api_keys          the file of API keys
api_key_book      the valid keys; follows the file as it changes
arriving_bodies   bodies that arrive: their number and size, and whose is let go
body_receiver     one of them: its place until it is whole
key_limits        requests a minute and requests at once, per key
api_key_metrics   requests of each key
refused_logins    requests without a valid key: counted and logged
refused_requests  requests that no endpoint got: logged with their reason
spaced_lines      when a line about something frequent is due
local_requests    without keys: no web page of another site is served
"""
