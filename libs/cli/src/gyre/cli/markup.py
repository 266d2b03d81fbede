"""HTML that cannot be got wrong: every text is escaped unless it is already `Html`."""

import contextlib
from collections.abc import Iterable
from html import escape
from pathlib import Path

from gyre.contracts.errors import ConfigError

VOID = frozenset({"br", "meta", "line", "rect", "circle", "path", "input"})


class Html(str):
    """Markup that is safe to insert as it is."""

    __slots__ = ()


Content = str | int | float | None


def join(parts: Iterable[Content]) -> Html:
    """The parts one after another; None is nothing."""
    return Html("".join(part if isinstance(part, Html) else escape(str(part)) for part in parts if part is not None))


def el(name: str, /, *content: Content, **attributes: Content) -> Html:
    """An element. `cls` is `class`; a trailing underscore is dropped, others become dashes; None leaves one out."""
    pairs = "".join(f' {_attribute(key)}="{escape(str(value))}"' for key, value in attributes.items()
                    if value is not None)
    if name in VOID:
        return Html(f"<{name}{pairs}/>")
    return Html(f"<{name}{pairs}>{join(content)}</{name}>")


def _attribute(key: str) -> str:
    if key == "cls":
        return "class"
    if key in ("viewBox", "preserveAspectRatio"):
        return key
    return key.rstrip("_").replace("_", "-")


def table(head: Iterable[Content], rows: Iterable[Iterable[Content]], numeric: frozenset[int] = frozenset()) -> Html:
    """A table that scrolls sideways where it must. Columns in `numeric` are aligned right."""
    def cells(name: str, row: Iterable[Content]) -> Html:
        return join(el(name, value, cls="num" if i in numeric else None) for i, value in enumerate(row))

    body = join(el("tr", cells("td", row)) for row in rows)
    return el("div", el("table", el("thead", el("tr", cells("th", head))), el("tbody", body)), cls="scroll")


def write_whole(page: str, path: Path) -> None:
    """Write a page to `path`; an older one is replaced at once. Raises ConfigError if that cannot be."""
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
