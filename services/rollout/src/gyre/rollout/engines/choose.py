"""Which engine a process takes: by name, or with `auto` the first one that is installed and passes its probe.

`decide` is pure: what is installed and whether it passes is asked through `look`, and only as far as needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre.contracts.errors import ConfigError

#: On a GPU `auto` tries them in this order; the last one is always there.
ORDER = ("tensorrt_llm", "vllm", "sglang", "torch")

HOW_TO_GET = {
    "tensorrt_llm": "pip install 'opengyre-rollout[tensorrt-llm]' --extra-index-url https://pypi.nvidia.com, in an image with "
                    "CUDA and MPI (NVIDIA's release image has both), and start the engine process from there",
    "vllm": "make an environment .venv-vllm beside ours with: pip install 'vllm>=0.32' (0.32.0 ran, its CPU build; newer "
            "ones and CUDA builds are expected to)",
    "sglang": "make an environment .venv-sglang beside ours with: pip install 'sglang>=0.5.23'",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What a look at a backend found. `version` may be empty; `problem` says why it would not serve, '' if it would."""

    installed: bool
    version: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """`why` says also what was passed over."""

    backend: str
    why: str


def decide(wanted: str, device: str, look: Callable[[str], Found]) -> Choice:
    """The backend for `engine.backend = wanted` on a `device` that is "cpu" or "cuda".

    Raises:
        ConfigError: a backend that was named is not installed, or does not pass; the message says how to get it.
    """
    if wanted != "auto":
        return _named(wanted, look)
    if device != "cuda":
        return Choice("torch", "auto: no GPU, so our own engine")
    passed_over = []
    for backend in ORDER[:-1]:
        found = look(backend)
        if found.installed and not found.problem:
            return Choice(backend, "; ".join(["auto: first on a GPU that passes its probe", *_version(found), *passed_over]))
        passed_over.append(f"{backend}: {found.problem or 'not installed'}")
    return Choice(ORDER[-1], "; ".join(["auto: our own engine", *passed_over]))


def _named(wanted: str, look: Callable[[str], Found]) -> Choice:
    if wanted not in HOW_TO_GET:
        return Choice(wanted, "named in the configuration")
    found = look(wanted)
    if not found.installed:
        raise ConfigError(f"engine.backend = {wanted!r}: not installed{_because(found)}; {HOW_TO_GET[wanted]}")
    if found.problem:
        raise ConfigError(f"engine.backend = {wanted!r}: {found.problem}")
    return Choice(wanted, "; ".join(["named in the configuration", *_version(found)]))


def _version(found: Found) -> list[str]:
    return [f"version {found.version}"] if found.version else []


def _because(found: Found) -> str:
    return f" ({found.problem})" if found.problem else ""


def agree(place: Path, choice: Choice) -> None:
    """All cells of a run use one engine: the first to choose writes it down, and whoever chooses otherwise is refused.

    Raises:
        ConfigError: another process of this run chose another engine.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = place.with_name(f".{place.name}.{os.getpid()}")
    staged.write_text(json.dumps(asdict(choice)))
    try:
        os.link(staged, place)  # whole or not at all, and only once
    except FileExistsError:
        first = Choice(**json.loads(place.read_text()))
        if first.backend != choice.backend:
            raise ConfigError(
                f"engine.backend = 'auto': this process would take {choice.backend} ({choice.why}), but another cell of the "
                f"run took {first.backend} ({first.why}); make them alike, or name one engine in engine.backend"
            ) from None
    finally:
        staged.unlink()
