"""The edge to NIXL: the few calls of its Python agent that are used, and how one is opened.

Written against `nixl-cu12` 1.5. Its `deserialize_descs` unpickles what a peer sent, so it is not used: addresses and
lengths travel as plain integers in the region's descriptor.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.transfer.errors import BackendUnavailable

PACKAGE = "nixl_cu12"
MEMORY = "DRAM"
PLUGIN = "UCX"
PROGRESS_US = 10_000  # the progress thread looks at least so often; what arrives wakes it at once


class Agent(Protocol):
    """`nixl_cu12._api.nixl_agent`, as far as it is used. Every call may raise one of the library's own errors."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any: ...

    def deregister_memory(self, dereg_list: Any) -> None: ...

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool, backends: list[str]) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> object: ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any: ...

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any: ...

    def transfer(self, handle: Any) -> str:
        """Post the transfer: "DONE", "PROC" or "ERR"."""
        ...

    def check_xfer_state(self, handle: Any) -> str: ...

    def release_xfer_handle(self, handle: Any) -> None:
        """Free a handle. Only ever called on one that is terminal: releasing an active one has crashed processes."""
        ...


@dataclass(frozen=True)
class NixlApi:
    """An open agent, its name among peers, and the exceptions its calls raise."""

    agent: Agent
    name: str
    errors: tuple[type[Exception], ...]


def installed() -> bool:
    """Whether the optional package is here (it is not imported for the answer)."""
    return importlib.util.find_spec(PACKAGE) is not None


def open_agent(owner: str) -> NixlApi:
    """An agent over UCX for this process; raises `BackendUnavailable`.

    The name is new for every process, so that a peer never takes a restarted owner for the dead one.
    """
    if not installed():
        raise BackendUnavailable("backend 'nixl' needs the package nixl-cu12: install opengyre-transfer[nixl]")
    api = importlib.import_module(f"{PACKAGE}._api")
    bindings = importlib.import_module(f"{PACKAGE}._bindings")
    errors = tuple(v for v in vars(bindings).values() if isinstance(v, type) and issubclass(v, Exception))
    name = f"{owner}-{secrets.token_hex(4)}"
    try:
        with _patient(bindings):
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[PLUGIN]))
    except (*errors, RuntimeError) as error:
        raise BackendUnavailable(f"backend 'nixl': no agent with plugin {PLUGIN}: {error!r}") from error
    if PLUGIN not in agent.backends:
        raise BackendUnavailable(f"backend 'nixl': plugin {PLUGIN} is not part of this build of NIXL")
    return NixlApi(agent, name, errors)


@contextmanager
def _patient(bindings: Any) -> Iterator[None]:
    """Agents that are made meanwhile wait for work in their progress thread.

    The Python agent fixes the thread's delay at 0, with which it polls without a pause and takes a whole processor from the
    engine or the trainer that it serves; the binding below takes any.
    """
    make = bindings.nixlAgent

    def patient(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_US
        return make(name, config)

    bindings.nixlAgent = patient
    try:
        yield
    finally:
        bindings.nixlAgent = make
