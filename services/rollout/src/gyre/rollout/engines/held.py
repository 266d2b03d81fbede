"""What an engine of kind `ticket` has given tickets for, until its KV is surely not held any more."""

from __future__ import annotations

from collections.abc import Callable


class HeldTickets:
    """`lease_s`: how long whoever holds the KV may hold it. `clock` counts seconds."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._until: dict[bytes, float] = {}

    def add(self, ticket: bytes) -> None:
        self._until[ticket] = self._clock() + self._lease_s

    def drop(self, ticket: bytes) -> None:
        """Used or released; unknown ones are ignored."""
        self._until.pop(ticket, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._until.clear()

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._until

    def __len__(self) -> int:
        """How many are held now: a lease ends by itself, also while nobody asks for anything."""
        now = self._clock()
        self._until = {ticket: until for ticket, until in self._until.items() if until > now}
        return len(self._until)
