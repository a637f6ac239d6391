"""Tools of developers: stubs and tables, mutants, training the demo model's draft layer."""
