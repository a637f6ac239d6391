"""Check a container's health: exit 0 when its process answers a GET with 200.

    python answers.py VARIABLE PATH

VARIABLE names the environment variable with the port, such as PDSERVE_PORT. PDSERVE_HOST is the
address. This starts every few seconds, so it imports little, and only the standard library.
"""

import http.client
import os
import sys

TIMEOUT_S = 3.0
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 (compared, not bound)


def main() -> int:
    port, path = int(os.environ[sys.argv[1]]), sys.argv[2]
    host = os.environ.get("PDSERVE_HOST", "")
    connection = http.client.HTTPConnection(
        "127.0.0.1" if host in EVERYWHERE else host, port, timeout=TIMEOUT_S
    )
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"{path}: {error}")
        return 1
    print(f"{path}: {status}")
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main())
