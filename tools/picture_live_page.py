"""Take the pictures of docs/live_page.md: the page of a running router, light and dark.

    python -m tools.picture_live_page --url http://127.0.0.1:8000 [docs/pictures]

The pictures show the cluster as it runs; nothing in them is made up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.browser import find_chromium, running_browser

WIDTH, HEIGHT = 1180, 1090


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.picture_live_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a router without API keys")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/pictures"))
    options = parser.parse_args(arguments)
    chromium = find_chromium()
    if chromium is None:
        print("no Chromium here: `apt-get install chromium`", file=sys.stderr)
        return 1
    with running_browser(chromium) as browser:
        tab = browser.open_tab().resize(WIDTH, HEIGHT)
        tab.goto(options.url)
        for phase in ("decode", "prefill"):
            tab.wait(f"!!document.querySelector('.dot[data-phase={phase}]')", timeout_s=60.0)
        tab.wait(
            "[...document.querySelectorAll('.dot')].every((dot) => !dot.getAnimations().length)"
        )
        for scheme in ("light", "dark"):
            path = options.folder / f"live_page_{scheme}.png"
            tab.prefer(scheme).screenshot(path, height=HEIGHT)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
