"""Runs a server and ends it, with everything it started, when whoever asked for it is gone: even by kill -9.

    python -I -S server_shim.py COMMAND...

Standard input is a pipe that its parent holds and never writes to: end of file means the parent is gone. The shim leads
a process group of its own; the server's children are in it. When the server ends, so does the rest of the group.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0  # from asking the server to stop until it is killed
POLL_S = 0.2


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # the group is asked to stop; the shim sees it through
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    while server.poll() is None and not _parent_is_gone():
        pass
    if server.poll() is None:
        server.terminate()
        deadline = time.monotonic() + GRACE_S
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
    print(f"server ended with {server.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)  # the shim with it


def _parent_is_gone() -> bool:
    readable, _, _ = select.select([0], [], [], POLL_S)
    return bool(readable) and os.read(0, 1) == b""


if __name__ == "__main__":
    main()
