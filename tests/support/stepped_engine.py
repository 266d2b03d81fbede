"""The built-in engine one iteration at a time, with leases on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import torch
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import EventStream, Finish, GenerateRequest, TokenEvent
from gyre.rollout.engines.moving import ExportOf, Frozen, Reservation
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.moves import StagedMover
from gyre.rollout.torch_engine.policies import Policy
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.rollout.torch_engine.sequence import Batch
from gyre.transfer import Transfer
from row_fabric import Fabric, FabricRows

VOCAB, BLOCK = 32, 4
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=128)
SMALL = SchedulerConfig(160, 128, BLOCK, 4, 16, 48, 12)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stepped(TorchEngine):
    """Does nothing by itself."""

    def __init__(
        self, fabric: Fabric, owner: str, scheduler: SchedulerConfig = SMALL, clock: Callable[[], float] | None = None,
        policy: PolicyConfig | Policy = POLICY, is_deterministic: bool = False, transfer: Transfer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.rows = FabricRows(fabric, owner)
        self.clock = Clock()
        config = TorchEngineConfig(scheduler, dtype, is_deterministic=is_deterministic)
        super().__init__(policy, config, transfer or self.rows, clock or self.clock)
        self._begun: Batch | None = None

    @property
    def moves(self) -> StagedMover:
        assert isinstance(self.mover, StagedMover)
        return self.mover

    async def _drive(self) -> None:
        await asyncio.Event().wait()

    async def step(self, num: int = 1) -> None:
        await self.end()
        for _ in range(num):
            async with self._boundary:
                await self._iterate()

    async def begin(self) -> None:
        """Schedules an iteration; `end` computes it. What happens in between happens while the model runs."""
        if self._begun is None:
            await self._boundary.acquire()
            self._begun = self._scheduler.schedule()
            if self._begun is None:
                self._boundary.release()
            else:
                self._rows = self._scheduler.sampling_rows(self._begun)

    async def end(self) -> None:
        """The model writes what it computes only now, into blocks that may have been given up meanwhile."""
        if self._begun is not None:
            batch, self._begun = self._begun, None
            self._scheduler.commit(batch, self._model_call(batch, self._rows))
            self._boundary.release()

    async def run(self, limit: int = 2000) -> None:
        """Until nothing is in flight."""
        for _ in range(limit):
            if not self._scheduler.has_work:
                return
            await self.step()
        raise AssertionError("a request never finished")

    async def load(self, version: int) -> None:
        state = state_of(version)
        await self.load_weights(version, state_digest(state), state)
        probe = await self.probe()
        assert probe.ok, probe.detail
        self.resume()

    def check_blocks(self, is_idle: bool = False) -> None:
        """Free, cached, live and held blocks are all there are, and every reference has an owner."""
        pool = self._scheduler.pool
        held = self.moves.blocks_held() + self._scheduler.withheld
        live = [block for s in self._scheduler.sequences for block in s.chain.blocks]
        used = set(held) | set(live)
        assert pool.num_free + pool.num_cached + len(used) == pool.num_blocks
        references = np.bincount(np.array(held + live, dtype=np.int64), minlength=pool.num_blocks)
        assert references.tolist() == pool._refs
        if is_idle:
            assert not used and len(self._scheduler.slots.free) == self._config.scheduler.max_running


_STATES: dict[int, dict[str, torch.Tensor]] = {}


def state_of(version: int) -> dict[str, torch.Tensor]:
    """Weights with wide logits, so that a wrong context shows."""
    if version not in _STATES:
        decoder = Decoder.create(POLICY, version).requires_grad_(False)
        decoder.model.embed_tokens.weight.mul_(30)
        _STATES[version] = dict(decoder.state_dict())
    return _STATES[version]


async def started(fabric: Fabric, owner: str, version: int = 1, **options: object) -> Stepped:
    engine = Stepped(fabric, owner, **options)  # type: ignore[arg-type]
    await engine.load(version)
    return engine


def ids_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def tokens_of(stream: EventStream) -> list[TokenEvent]:
    """Everything that was pushed so far, without taking it."""
    return [event for event in stream._events if isinstance(event, TokenEvent)]


def finish_of(stream: EventStream) -> Finish:
    last = stream._events[-1]
    assert isinstance(last, Finish)
    return last


def replay_of(request: GenerateRequest, emitted: list[TokenEvent], ticket: str = "") -> GenerateRequest:
    """The rest of a request, after `emitted` of its own tokens."""
    fresh = np.array([e.token_id for e in emitted], dtype=np.int32)
    return GenerateRequest(
        request.request_id, np.concatenate((request.prompt_ids, fresh)), request.max_tokens - len(fresh),
        request.temperature, request.top_p, request.top_k, request.stop_token_ids, request.seed, request.namespace,
        request.num_emitted + len(fresh), ticket.encode(),
    )  # fmt: skip


async def copy(source: Stepped, destination: Stepped, ticket: str, what: ExportOf, epoch: int = 1) -> tuple[str, int]:
    """The live part of a move: everything up to, but not, the freeze. The region and how many blocks have arrived."""
    offer = await source.moves.open_export(ticket, what, 30.0)
    await destination.moves.reserve(reservation_of(ticket, source, offer.namespace, offer.max_tokens, epoch))
    stage = await source.moves.read_stage(ticket, 0)
    await destination.moves.pull(ticket, offer.region, stage, 5.0)
    return offer.region, len(stage.rows)


def reservation_of(ticket: str, source: Stepped, namespace: str, num_tokens: int, epoch: int = 1) -> Reservation:
    version = source.load_report().version
    return Reservation(ticket, epoch, source.capabilities.layout, version, namespace, num_tokens, 30.0)


async def move(source: Stepped, destination: Stepped, ticket: str, what: ExportOf) -> Frozen:
    """A whole move, up to the commit."""
    region, num_blocks = await copy(source, destination, ticket, what)
    frozen = await source.moves.freeze(ticket, num_blocks)
    await destination.moves.pull(ticket, region, frozen.tail, 5.0)
    await destination.moves.commit(ticket, frozen)
    return frozen


async def move_in_stages(source: Stepped, destination: Stepped, ticket: str, what: ExportOf) -> Frozen:
    """A whole move as `migration.py` does it, while the source does nothing else."""
    offer = await source.moves.open_export(ticket, what, 30.0)
    await destination.moves.reserve(reservation_of(ticket, source, offer.namespace, offer.num_tokens))
    stage = await source.moves.read_stage(ticket, 0)
    while len(stage.rows):
        await destination.moves.pull(ticket, offer.region, stage, 5.0)
        stage = await source.moves.read_stage(ticket, stage.first_block + len(stage.rows))
    frozen = await source.moves.freeze(ticket, stage.first_block)
    await destination.moves.pull(ticket, offer.region, frozen.tail, 5.0)
    await destination.moves.commit(ticket, frozen)
    return frozen
