"""Ports for processes that are started a moment later."""

import contextlib
import random
import socket
from pathlib import Path

LOWEST = 10_000  # below it other services have theirs
OF_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(num: int, host: str) -> list[int]:
    """`num` different TCP ports of `host` that are free now.

    None of those that the system gives to whoever connects to somebody, unless there are no others: until a process listens
    on its port, or while it is started again, such a connection could take it and keep it.

    Raises:
        OSError: so many are not free, or `host` is not this machine's.
    """
    first, last = ports_of_clients()
    others = [*range(LOWEST, first), *range(last + 1, 65_536)]
    found: list[int] = []
    with contextlib.ExitStack() as held:  # all are held until the last is found
        for port in random.SystemRandom().sample(others, len(others)):
            if len(found) == num:
                return found
            if (bound := _bound(host, port, held)) is not None:
                found.append(bound)
        while len(found) < num:
            each = held.enter_context(socket.socket())
            each.bind((host, 0))  # whichever the system likes
            found.append(each.getsockname()[1])
    return found


def _bound(host: str, port: int, held: contextlib.ExitStack) -> int | None:
    each = held.enter_context(socket.socket())
    try:
        each.bind((host, port))
    except OSError:
        each.close()
        return None
    return port


def ports_of_clients() -> tuple[int, int]:
    """The first and the last port that a connection may be given: Linux says so, others keep to what IANA set aside."""
    try:
        first, last = map(int, OF_CLIENTS.read_text().split())
    except (OSError, ValueError):
        return 49_152, 65_535
    return first, last
