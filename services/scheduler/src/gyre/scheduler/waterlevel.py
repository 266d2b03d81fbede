"""Counting executions: w = dispatched - terminated, whatever the order in which the two facts arrive."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Waterlevel:
    """An execution counts as live from its dispatch until its termination; a termination that is seen first is kept."""

    dispatched: set[str] = field(default_factory=set)
    terminated: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)

    @property
    def level(self) -> int:
        """w, the number of executions that are dispatched and not terminated."""
        return len(self.live)

    def dispatch(self, executions: list[str]) -> None:
        self.dispatched.update(executions)
        self.live.update(x for x in executions if x not in self.terminated)

    def terminate(self, execution: str) -> None:
        self.terminated.add(execution)
        self.live.discard(execution)
