"""How many examples or seeds a test tries: few in everyday runs, all of them elsewhere.

All are tried under the hypothesis profile `thorough` (`make test-examples`), and where mutants are
run, which must not survive because of fewer examples.
"""

from __future__ import annotations

from hypothesis import settings

_WITH_ALL = ("thorough", "unshrunk")


def everyday(few: int, *, of: int) -> int:
    """Return `few`, or in a run of all examples the whole number `of`.

    The profile is known when test files are imported, so module constants may call this.
    """
    return of if settings.get_current_profile_name() in _WITH_ALL else few
