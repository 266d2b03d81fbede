"""Names of things: how ids are checked and how they are built from one another.

Every id may become a NATS subject token and a file name, so it is checked once, where it enters.
"""

import re
import uuid

from gyre.contracts.errors import InvalidId

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_SAID = 80  # characters of a wrong value that its error repeats


def check_id(value: str, field: str) -> str:
    """Return `value` if it is usable as a subject token and a file name.

    Raises:
        InvalidId: names the field, the value and what would be right.
    """
    if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
        said = value[:_MAX_SAID] if isinstance(value, str) else value  # who sent it may have sent a megabyte
        raise InvalidId(f"{field}: {said!r} is not an id; use 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def group_id(burst: int, index: int) -> str:
    """Group number `index` of a burst, e.g. `g00003-007`."""
    return f"g{burst:05d}-{index:03d}"


def evaluation_group_id(label: str, index: int) -> str:
    """Group `index` of a held-out evaluation, e.g. `e-before-012`."""
    return f"e-{label}-{index:03d}"


def execution_id(group: str, index: int) -> str:
    """Execution `index` of a group, e.g. `g00003-007-x02`."""
    return f"{group}-x{index:02d}"


def call_id(execution: str, index: int) -> str:
    """Call `index` of an execution, in the order in which the gateway accepted them."""
    return f"{execution}-c{index:04d}"


def micro_step_id(group: str, index: int) -> str:
    """Micro-step `index` of a group."""
    return f"{group}-m{index:03d}"


def new_envelope_id() -> str:
    """A fresh random id for an envelope; idempotency rests on the key, never on this."""
    return uuid.uuid4().hex
