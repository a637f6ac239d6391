"""The version of this package, which metrics, traces and `pdserve --version` show."""

VERSION = "0.1.0"
