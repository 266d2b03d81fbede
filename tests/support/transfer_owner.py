"""A process that owns one region: `python transfer_owner.py BACKEND DIRECTORY MEGABYTES`.

It says its descriptor as one line of JSON, and again after every line it is told, having added 1 to every element first.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gyre.transfer import Address, Transfer, TransferConfig


def main() -> None:
    backend, directory, megabytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    ways = {
        "shm": TransferConfig("owner", directory=directory),
        "tcp": TransferConfig("owner", listen=Address("127.0.0.1", 0)),
        "nixl": TransferConfig("owner", backends=("nixl",)),
    }
    with Transfer(ways[backend]) as owner:
        region = owner.register("weights", {"w": np.zeros(megabytes << 18, np.float32), "v": np.arange(5)})
        while True:
            print(json.dumps(owner.describe("weights").to_wire()), flush=True)
            if not sys.stdin.readline():
                return
            with region.rewriting() as arrays:
                arrays["w"] += 1


if __name__ == "__main__":
    main()
