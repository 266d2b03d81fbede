"""Text of others on a terminal: characters that would steer it are shown instead of sent.

A policy may sample any character, and a trace of another tool may hold any; neither may move the cursor, set a title,
or turn a line around.
"""

from rich.text import Text

_KEPT = (0x09, 0x0A)  # tab and line feed are layout
_REVERSING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = ({code: 0x2400 + code for code in range(0x20) if code not in _KEPT} | {0x7F: 0x2421}
          | dict.fromkeys((*range(0x80, 0xA0), *_REVERSING), 0xFFFD))


def harmless(text: str) -> str:
    """`text`, as long as it was, with a visible sign for every control character."""
    return text.translate(_SHOWN)


def harmless_line(line: Text) -> Text:
    """The same of a styled line."""
    found = line.copy()
    found.plain = harmless(line.plain)
    return found
