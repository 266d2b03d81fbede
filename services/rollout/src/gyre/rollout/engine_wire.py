"""What engines say about moves, as gRPC messages and back. Bytes at the edge: ids are little-endian int32."""

from __future__ import annotations

import numpy as np
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.rollout.engines.moving import Frozen, MoveRefused, Offer, Reservation, Stage


def offer_message(offer: Offer) -> pb.Offer:
    return pb.Offer(layout=offer.layout, weights_version=offer.weights_version, namespace=offer.namespace,
                    num_tokens=offer.num_tokens, max_tokens=offer.max_tokens, region=offer.region,
                    block_bytes=offer.block_bytes)


def offer_of(ticket: str, message: pb.Offer) -> Offer:
    return Offer(ticket, message.layout, message.weights_version, message.namespace, message.num_tokens,
                 message.max_tokens, message.region, message.block_bytes)


def stage_message(stage: Stage) -> pb.Stage:
    return pb.Stage(first_block=stage.first_block, rows=stage.rows.tolist(), checksums=stage.checksums,
                    token_ids=ids_bytes(stage.token_ids), kv_versions=stage.kv_versions.tolist())


def stage_of(message: pb.Stage) -> Stage:
    """Raises MoveRefused if the stage's parts do not fit together."""
    num_rows = len(message.rows)
    if not num_rows == len(message.checksums) == len(message.kv_versions):
        raise MoveRefused(f"stage of {num_rows} rows has {len(message.checksums)} checksums and "
                          f"{len(message.kv_versions)} kv_versions")
    return Stage(message.first_block, np.asarray(message.rows, np.int64), tuple(message.checksums),
                 ids_of(message.token_ids), np.asarray(message.kv_versions, np.int64))


def frozen_message(frozen: Frozen) -> pb.Frozen:
    return pb.Frozen(tail=stage_message(frozen.tail), num_known=frozen.num_known, num_computed=frozen.num_computed,
                     known_ids=ids_bytes(frozen.known_ids), digest=frozen.digest, opaque=frozen.opaque)


def frozen_of(message: pb.Frozen) -> Frozen:
    """Raises MoveRefused if its tail's parts do not fit together."""
    return Frozen(stage_of(message.tail), message.num_known, message.num_computed, ids_of(message.known_ids),
                  message.digest, message.opaque)


def opaque_frozen(opaque: bytes, known_ids: np.ndarray | None = None) -> Frozen:
    """What an engine of kind `ticket` says of a request that it ended, or with `known_ids` of a prefix that it holds."""
    nothing = np.empty(0, np.int64)
    tail = Stage(0, nothing, (), np.empty(0, np.int32), nothing)
    known_ids = np.empty(0, np.int32) if known_ids is None else known_ids
    return Frozen(tail, len(known_ids), len(known_ids), known_ids, b"", opaque)


def reservation_message(reservation: Reservation) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        ticket=reservation.ticket, epoch=reservation.epoch, layout=reservation.layout,
        weights_version=reservation.weights_version, namespace=reservation.namespace,
        num_tokens=reservation.num_tokens, lease_s=reservation.lease_s)


def reservation_of(message: pb.ReserveRequest) -> Reservation:
    return Reservation(message.ticket, message.epoch, message.layout, message.weights_version, message.namespace,
                       message.num_tokens, message.lease_s)


def ids_bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def ids_of(data: bytes) -> np.ndarray:
    """int32 [T]. Raises MoveRefused."""
    if len(data) % 4:
        raise MoveRefused(f"token ids: {len(data)} bytes are not whole little-endian int32")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
