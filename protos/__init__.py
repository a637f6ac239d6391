"""The control plane's messages, and their translation to and from the values in `common`."""
