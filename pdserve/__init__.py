"""The command: where a configuration is read and concrete parts are chosen and joined."""

__version__ = "0.1.0"
