"""What an image installs before the project itself, one requirement a line.

    python requirements.py [--extras NAME…] [--paddle REQUIREMENT]

Made from pyproject.toml alone, so that the layer that holds it outlives every change of the code.
"""

import argparse
import tomllib
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", nargs="*", default=[], help="of the project")
    parser.add_argument("--paddle", default="", help="instead of paddlepaddle")
    options = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in options.extras:
        wanted += project["optional-dependencies"][extra]
    for requirement in wanted:
        is_paddle = requirement.startswith("paddlepaddle")
        print(options.paddle if options.paddle and is_paddle else requirement)


if __name__ == "__main__":
    main()
