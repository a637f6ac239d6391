"""What developers run: generating stubs, training the demo model's draft layer."""
