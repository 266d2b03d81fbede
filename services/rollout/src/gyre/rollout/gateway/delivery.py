"""Which recorded answers reached the harness. Nothing is known of an answer until something shows that it did."""


class Deliveries:
    """The recorded calls of one execution whose answer may not have been seen, in the order they were recorded."""

    __slots__ = ("_news", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._news: list[str] = []

    def recorded(self, call: str) -> None:
        """A call was recorded; its answer is on its way."""
        self._waiting.setdefault(call)

    def reached(self, *calls: str) -> None:
        """The answers of `calls` reached the harness."""
        for call in calls:
            if call in self._waiting:
                del self._waiting[call]
                self._news.append(call)

    def is_waiting(self, call: str) -> bool:
        """Whether nothing has shown yet that the answer of a recorded call arrived."""
        return call in self._waiting

    @property
    def undelivered(self) -> tuple[str, ...]:
        """Calls whose answer never arrived, as far as can be told now."""
        return tuple(self._waiting)

    @property
    def news(self) -> tuple[str, ...]:
        """Calls that arrived since `saved`, for the archive."""
        return tuple(self._news)

    def saved(self, num: int | None = None) -> None:
        """The first `num` of `news`, or all of them, are in the archive."""
        del self._news[:num]
