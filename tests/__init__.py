"""All tests; helpers that several of them share lie beside this file."""
