"""A process that owns one region: `python transfer_owner.py BACKEND DIRECTORY MEGABYTES`.

It says its descriptor as one line of JSON, and again after every line it is told, having added 1 to every element first.
Told "rows", it registers a pool of `NUM_ROWS` rows (anew), says {"pool": its descriptor, "checksums": of its rows in hex},
and goes on writing the odd rows until it is told something else.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np
from gyre.transfer import Address, Transfer, TransferConfig, row_checksum

NUM_ROWS, ROW_FLOATS = 256, 4096


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
            told = sys.stdin.readline()
            while told.startswith("rows"):
                told = serve_rows(owner)
            if not told:
                return
            with region.rewriting() as arrays:
                arrays["w"] += 1


def serve_rows(owner: Transfer) -> str:
    """The line that ended it."""
    pool = owner.register_rows("pool", NUM_ROWS, (ROW_FLOATS,), np.float32).arrays["rows"]
    pool[...] = np.arange(NUM_ROWS)[:, None]
    said = {"pool": owner.describe_rows("pool").to_wire(), "checksums": [row_checksum(row).hex() for row in pool]}
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.001):
            pool[1::2] += 1

    writer = threading.Thread(target=write)
    writer.start()
    print(json.dumps(said), flush=True)
    told = sys.stdin.readline()
    stop.set()
    writer.join()
    return told


if __name__ == "__main__":
    main()
