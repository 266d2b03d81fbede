"""Weights of one version, readable one-sided: satellites pull what they train with, engines what was published.

Two regions: `weights` always holds the version that is being trained; `published` the newest published one, which has
to stay as it is while the next step is already trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import state_digest
from gyre.runtime.config import Endpoint
from gyre.transfer import Address, RegionDescriptor, Transfer, TransferConfig, TransferError, backends_of
from gyre.transfer.tensors import arrays_of, tensors_of

TRAINING = "weights"
PUBLISHED = "published"


@dataclass(frozen=True)
class WeightsTicket:
    """How to get weights `version`: a transfer descriptor as text, and the digest the loaded state must have."""

    version: int
    checksum: str
    transfer: str


def open_transfer(owner: str, regions_dir: str, endpoint: Endpoint, choice: str = "auto") -> Transfer:
    """This worker's transfer server: files beside the cells' locks, TCP at the deployment's endpoint (host:port).

    choice: the deployment's `transfer`, how this worker reads; NIXL serves its regions too where it is a choice.
    """
    host, port = _split(endpoint.listen)
    advertised, advertised_port = _split(endpoint.address)
    if port and port != advertised_port:
        raise ConfigError(f"transfers: {endpoint.listen!r} is announced as {endpoint.address!r}; the ports must agree")
    backends = backends_of(choice)
    return Transfer(TransferConfig(owner, Path(regions_dir), Address(host, port), advertised, backends))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"transfers: {address!r} must be host:port")
    return host.strip("[]"), int(port)


def offer_weights(transfer: Transfer, region: str, version: int, state: Mapping[str, torch.Tensor]) -> WeightsTicket:
    """Put `state` into `region`; tickets of other versions of the region stop working."""
    arrays = arrays_of(state)
    known = transfer.find(region)
    if known is None:
        transfer.register(region, arrays)
    else:
        with known.rewriting() as views:
            for name, array in arrays.items():
                views[name][...] = array
    return WeightsTicket(version, state_digest(state), descriptor_text(transfer.describe(region)))


async def pull_weights(transfer: Transfer, ticket: WeightsTicket, timeout_s: float) -> dict[str, torch.Tensor]:
    """Read and verify; raises a `TransferError`, also when the digest is another one."""
    state = tensors_of(await transfer.read(descriptor_of(ticket.transfer), timeout_s=timeout_s))
    digest = state_digest(state)
    if digest != ticket.checksum:
        raise TransferError(f"weights v{ticket.version}: digest {digest}, expected {ticket.checksum}")
    return state


def descriptor_text(descriptor: RegionDescriptor) -> str:
    return json.dumps(descriptor.to_wire(), separators=(",", ":"))


def descriptor_of(text: str) -> RegionDescriptor:
    """What a peer said; raises `TransferError` for anything that is no descriptor."""
    try:
        return RegionDescriptor.from_wire(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TransferError(f"not a transfer descriptor: {text[:80]!r}: {error!r}") from error
