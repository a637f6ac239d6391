"""The error of all checks."""

from __future__ import annotations

from common.errors import InternalError


class Violation(InternalError):
    """Something that must hold does not; it says in one sentence what."""
