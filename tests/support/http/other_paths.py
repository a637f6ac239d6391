"""Other ways to write a path, by which a request may try to reach what its plain path does not."""

from __future__ import annotations

from collections.abc import Callable


def first_slash_doubled(path: str) -> str:
    return f"/{path}"


def last_slash_doubled(path: str) -> str:
    head, _, tail = path.rpartition("/")
    return f"{head}//{tail}"


def with_dot(path: str) -> str:
    head, _, tail = path.rpartition("/")
    return f"{head}/./{tail}"


def through_parent(path: str) -> str:
    return f"/v1/models/..{path}"


def last_slash_escaped(path: str) -> str:
    head, _, tail = path.rpartition("/")
    return f"{head}%2F{tail}"


def last_letter_escaped(path: str) -> str:
    return f"{path[:-1]}%{ord(path[-1]):02X}"


WAYS: dict[str, Callable[[str], str]] = {
    **{
        f"with {end!r} at its end": lambda path, end=end: path + end  # type: ignore[misc]
        for end in (
            *("%0A", "%0a", "%0D", "%0D%0A", "%00", "%09", "%20", "%0B", "%0C", "%1F", "%7F"),
            *("%85", "%C2%85", "%E2%80%A8", "%E2%80%A9", "%FF", "%", "%zz", "%2", "%u000A"),
            *("/", "//", "/.", "/..", "%2F", "%2f", "%5C", "\\", "%2e", "%2E", "/%2e", "/%2e%2e"),
            *(
                ";x",
                ";x=1",
                "?",
                "?x",
                "?%0A",
                "#x",
                "%23",
                "%3F",
                "%3Bx",
                ".json",
                "%252F",
                "%250A",
            ),
        )
    },
    "with '%0A' at its beginning": lambda path: f"/%0A{path[1:]}",
    "with '%0A' before its last part": lambda path: "/%0A".join(path.rsplit("/", 1)),
    "with its first slash doubled": first_slash_doubled,
    "with its last slash doubled": last_slash_doubled,
    "with '/./' in it": with_dot,
    "through '..'": through_parent,
    "through '%2e%2e'": lambda path: f"/v1/models/%2e%2e{path}",
    "through a name with '%2F'": lambda path: f"/v1/models/..%2F..{path.replace('/', '%2F')}",
    "with its last slash escaped": last_slash_escaped,
    "with all slashes escaped": lambda path: path.replace("/", "%2F"),
    "with its last letter escaped": last_letter_escaped,
    "in upper case": str.upper,
    "in mixed case": str.title,
    "in absolute form": lambda path: f"http://elsewhere.example{path}",
    "in absolute form, with '%0A'": lambda path: f"http://localhost{path}%0A",
    "in absolute form, of another scheme": lambda path: f"x://localhost{path}",
}
"""Each makes the target of a request from a path."""
