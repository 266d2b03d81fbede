"""Where a call or a cached prefix should go, pure: what is known of the engines in, an order of cells out."""

from collections.abc import Iterable
from dataclasses import dataclass

ROOM_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that admits, as one execution sees it.

    `availability`: grows with the time it will go on serving. `num_prefix`: tokens of the execution whose KV it holds.
    `kv_free`: tokens it has room for, less what is promised to others; ROOM_UNKNOWN before it said so.
    `num_live` calls are on it, `max_live` run at once.
    """

    cell: int
    availability: float = 0.0
    num_prefix: int = 0
    kv_free: int = ROOM_UNKNOWN
    num_live: int = 0
    max_live: int = 2**31

    def has_room(self, num_tokens: int) -> bool:
        """Whether a call that may grow to `num_tokens` fits now."""
        return self.num_live < self.max_live and (self.kv_free == ROOM_UNKNOWN or self.kv_free >= num_tokens)


def destinations(candidates: Iterable[Candidate], num_tokens: int) -> list[int]:
    """Cells that what leaves an engine may go to, best first.

    The one that stays longest, so that it need not move again; then the one that holds most of its prefix; then the one
    with most room. Those that are full now come last.
    """
    def worth(c: Candidate) -> tuple[bool, float, int, int, int]:
        return c.has_room(num_tokens), c.availability, c.num_prefix, c.kv_free, -c.num_live

    return [c.cell for c in sorted(candidates, key=worth, reverse=True)]


def home(candidates: Iterable[Candidate]) -> int:
    """The cell for a call whose execution has no engine: the one that holds most of its prefix, else the least loaded.

    New work is spread, or engines that stay long would decode everything while the others idle. Raises ValueError if
    there is no candidate.
    """
    return min(candidates, key=lambda c: (-c.num_prefix, c.num_live, c.cell)).cell
