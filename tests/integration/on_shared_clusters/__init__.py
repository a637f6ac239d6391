"""Tests on two clusters, one of them with keys, that start once and end with the last test here."""
