"""Print what an image installs before the project itself, one requirement a line.

    python requirements.py [--extras NAME…]

It reads pyproject.toml alone, so the image layer with the dependencies is rebuilt only when they
change, and not with every change of the code.
"""

import argparse
import tomllib
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", nargs="*", default=[], help="of the project")
    options = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in options.extras:
        wanted += project["optional-dependencies"][extra]
    print(*wanted, sep="\n")


if __name__ == "__main__":
    main()
