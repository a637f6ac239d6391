"""Who may use the router, and how much.

middleware       around every request: its id, its API key, its limits
api_keys         the file of API keys
api_key_book     the keys that hold now; follows the file as it changes
key_limits       requests a minute and requests at once, per key
api_key_metrics  what each key does
"""
