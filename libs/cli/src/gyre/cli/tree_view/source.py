"""Where a tree comes from: a file, the blob store of a run, or the trajectory service of a run that is up."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from gyre.cli.run_dir import RunDir, find_running, open_existing, read_pids
from gyre.cli.treefile import Decode, Header, TreeView, read_tree, spelled, tree_from_bytes, tree_from_json
from gyre.contracts.codec import unpack
from gyre.contracts.errors import BrokenBody, ConfigError, InvalidId
from gyre.contracts.ids import check_id
from gyre.policy.tokenizer import TOKENIZER_FILE, ChatTokenizer
from gyre.proto.trajectory.v1 import service_pb2, service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.blobs import BlobStore, open_blobs
from gyre.runtime.config import Deployment, load_deployment, load_run

TREES = "trees"
SUFFIX = ".msgpack"
MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class _HeadOnly:
    """As much of a tree file as a list of trees needs."""

    header: Header | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A run whose trees are looked at. `how` says why this one."""

    run: RunDir
    how: str
    deployment: Deployment
    blobs: BlobStore

    @property
    def is_up(self) -> bool:
        return bool(read_pids(self.run))

    @property
    def said(self) -> str:
        return f"run {self.run.name} ({self.how})"


def find_place(run: Path | None, runs: Path) -> Place:
    """The run that was named, else the one that is up, else the newest under `runs`. Raises ConfigError."""
    found, how = (open_existing(run), "named by --run") if run else (find_running(runs), "is up")
    if found is None:
        made = sorted(runs.glob("*/run.toml"), key=lambda path: path.stat().st_mtime)
        if not made:
            raise ConfigError(f"no run under {runs}; name one with --run, or a .msgpack file of a tree")
        found, how = open_existing(made[-1].parent), f"the newest under {runs}"
    if not found.deployment.exists():
        raise ConfigError(f"{found.path}: deployment.toml is missing, so there is no blob store to read trees from")
    deployment = load_deployment(found.deployment)
    return Place(found, how, deployment, open_blobs(deployment.blobs))


def names(place: Place) -> list[str]:
    """Executions whose trees lie in the blob store, ascending."""
    found = place.blobs.names(TREES)
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def headers(place: Place, prefix: str = "") -> list[tuple[str, Header | None]]:
    """(execution, header) of every tree whose execution begins with `prefix`; None: it cannot be read."""
    found: list[tuple[str, Header | None]] = []
    for name in (n for n in names(place) if n.startswith(prefix)):
        try:
            found.append((name, unpack(place.blobs.read(f"{TREES}/{name}{SUFFIX}"), _HeadOnly).header))
        except (BrokenBody, FileNotFoundError):
            found.append((name, None))
    return found


def open_file(path: Path) -> TreeView:
    """A tree from a file of its own. Raises ConfigError."""
    try:
        return tree_from_bytes(path.read_bytes())
    except (OSError, BrokenBody) as error:
        raise ConfigError(f"{path}: no tree can be read from it: {error}") from error


async def open_tree(place: Place, execution: str) -> TreeView:
    """The tree of an execution: from the blob store, else from the service if the run is up.

    Raises:
        ConfigError: nobody knows it; names executions that are known.
        BrokenBody: its file cannot be read.
    """
    try:
        check_id(execution, "EXECUTION")
        return read_tree(place.blobs, execution)
    except InvalidId as error:
        raise ConfigError(f"{error}; {known(place, execution)}") from None
    except FileNotFoundError:
        pass
    if not place.is_up:
        raise ConfigError(f"{place.said} has no tree of {execution!r}; {known(place, execution)}")
    try:
        return tree_from_json(await ask(place.deployment.trajectory.address, execution))
    except grpc.aio.AioRpcError as error:
        why = error.details() if error.code() == grpc.StatusCode.NOT_FOUND else f"{error.code().name}: {error.details()}"
        raise ConfigError(f"{place.said} has no tree of {execution!r}, and its trajectory service says: {why}; "
                          f"{known(place, execution)}") from None


async def ask(address: str, execution: str) -> bytes:
    """The tree of an execution as the trajectory service answers it. Raises AioRpcError."""
    async with rpc.channel(address, timeout_s=20.0) as channel:
        stub: Any = service_pb2_grpc.TrajectoryServiceStub(channel)
        return (await stub.InspectTree(service_pb2.InspectTreeRequest(execution=execution))).json


def known(place: Place, wanted: str) -> str:
    """Which executions there are: like the one that was wanted, else the last ones."""
    found = names(place)
    if not found:
        return "there are no trees yet: one is written when all executions of its group have ended and are scored"
    begun = [name for name in found if wanted and name.startswith(wanted)]
    group = [name for name in found if name.rpartition("-")[0] == wanted.rpartition("-")[0]]
    near = begun[:MAX_NAMED] or group[:MAX_NAMED] or difflib.get_close_matches(wanted, found, 5, 0.8)
    trained = [name for name in found if name.startswith("g")] or found
    last = [name for name in trained if name.split("-")[0] == trained[-1].split("-")[0]][:MAX_NAMED]
    which = f"like it: {', '.join(near)}" if near else f"of the last burst: {', '.join(last)}"
    return f"of {len(found):,} trees, {which}; `gyre tree --list` has them all"


# ---------------------------------------------------------------- text


def decoder(place: Place) -> Decode | None:
    """Ids to text with the tokenizer of the run's policy, None where there is none."""
    return decoder_of(Path(load_run(place.run.config).policy.checkpoint))


def decoder_of(checkpoint: Path) -> Decode | None:
    """Ids to text, a line break after every stop token inside."""
    if not (checkpoint / TOKENIZER_FILE).exists():
        return None
    tokenizer = ChatTokenizer.load(checkpoint)
    decode: Callable[[Sequence[int]], str] = tokenizer.decode
    stop_ids = frozenset(tokenizer.stop_ids)
    return lambda ids: spelled(ids, decode, stop_ids)
