"""Reading a page as a browser would, but strictly."""

from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "circle", "path", "br", "input", "!doctype"}


class WellFormed(HTMLParser):
    """Refuses an element that is closed by another, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(page: str) -> WellFormed:
    """The page, of which every element is closed where it was opened."""
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser
