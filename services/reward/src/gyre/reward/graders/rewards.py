"""How a Harbor task says its reward: `reward.json`, else `reward.txt`, in the verifier's log directory.

The exit code of `test.sh` says nothing. No file, an empty or broken one, a value that is no finite number and the
crash sentinel -1 all mean that there is no reward, which is never a reward of 0.
"""

import json
import math
import os
import stat
from pathlib import Path

from gyre.contracts.errors import EvaluationError
from gyre.reward.graders.base import Score, TaskBroken

MAX_REWARD_BYTES = 1024 * 1024
SENTINEL = -1.0


def read_rewards(directory: Path, key: str = "") -> Score:
    """The reward a verifier left in `directory`; `key` chooses among several values.

    Raises:
        EvaluationError: there is no usable reward.
        TaskBroken: there are several, and `key` is empty or not one of them.
    """
    if (text := _read_regular(directory / "reward.json")) is not None:
        return _from_json(text, key)
    if (text := _read_regular(directory / "reward.txt")) is not None:
        return _score(_number(_stripped(text, "reward.txt"), "reward.txt"), "reward.txt", {})
    raise EvaluationError("the verifier left neither reward.json nor reward.txt")


def _from_json(text: str, key: str) -> Score:
    try:
        value = json.loads(_stripped(text, "reward.json"))
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"reward.json is not JSON: {error}") from None
    if not isinstance(value, dict):
        return _score(_number(value, "reward.json"), "reward.json", {})
    chosen = _choose(value, key)
    metrics = {str(k): float(v) for k, v in value.items() if k != chosen and _is_finite(v)}
    return _score(_number(value[chosen], f"reward.json[{chosen!r}]"), f"reward.json[{chosen!r}]", metrics)


def _choose(values: dict[str, object], key: str) -> str:
    if key:
        if key not in values:
            raise TaskBroken(f"reward.reward_key = {key!r}: reward.json has {', '.join(sorted(values)) or 'nothing'}")
        return key
    if not values:
        raise EvaluationError("reward.json is an empty object")
    if "reward" in values:
        return "reward"
    if len(values) > 1:
        raise TaskBroken(f"reward.json has several values ({', '.join(sorted(values))}); set reward.reward_key to one")
    return next(iter(values))


def _stripped(text: str, name: str) -> str:
    if not text.strip():
        raise EvaluationError(f"{name} is empty")
    return text.strip()


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _number(value: object, name: str) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise EvaluationError(f"{name}: {value[:100]!r} is not a number") from None
    if not _is_finite(value):
        raise EvaluationError(f"{name}: {str(value)[:100]} is not a finite number")
    return float(value)


def _score(reward: float, name: str, metrics: dict[str, float]) -> Score:
    if reward == SENTINEL:
        raise EvaluationError(f"{name}: -1 says that the verifier crashed; it is not a reward")
    return Score(reward, int(reward >= 1.0), 1, metrics)


def _read_regular(path: Path) -> str | None:
    """The text of a plain file: no link is followed, no FIFO waited for. None if there is none.

    Raises:
        EvaluationError: something else is in its place, or it is too large.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvaluationError(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise EvaluationError(f"{path.name} is not a plain file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_REWARD_BYTES + 1)
    if len(data) > MAX_REWARD_BYTES:
        raise EvaluationError(f"{path.name} has more than {MAX_REWARD_BYTES} bytes")
    return data.decode("utf-8", "replace")
