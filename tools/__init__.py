"""Tools of developers: generating stubs and tables, training the demo model's draft layer."""
