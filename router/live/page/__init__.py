"""The live page as one document: `index.html` with its style sheet and scripts inside.

One document needs one round trip, and no path besides `/` that is open without a key. The policy
sent with it contains the hash of each script and style in the document, so the page runs nothing
else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
_SCRIPT = re.compile(r'<script src="([\w.-]+)"></script>')


@dataclass(frozen=True, slots=True)
class Page:
    """The response to `GET /`."""

    body: bytes
    headers: Mapping[str, str]


@cache
def live_page() -> Page:
    """Return the page; its parts are package data, read once."""
    styles: list[str] = []
    scripts: list[str] = []

    def put_style(match: re.Match[str]) -> str:
        styles.append(_part(match[1]))
        return f"<style>{styles[-1]}</style>"

    def put_script(match: re.Match[str]) -> str:
        scripts.append(_part(match[1]))
        return f"<script>{scripts[-1]}</script>"

    html = _SCRIPT.sub(put_script, _STYLE.sub(put_style, _part("index.html")))
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _policy(styles, scripts),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Page(html.encode(), headers)


def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _policy(styles: list[str], scripts: list[str]) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": " ".join(map(_hash, styles)),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
