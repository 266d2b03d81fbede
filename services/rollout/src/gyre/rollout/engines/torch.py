"""The built-in engine: scheduler, runner and sampler driven from an asyncio loop.

Small models run right in the loop, one iteration per turn: a thread would cost more in hand-overs than an iteration
takes, and the gRPC server gets its turn after each. Large models run the model call in one worker thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from gyre.contracts.errors import EngineError
from gyre.policy.config import PolicyConfig
from gyre.policy.model import PolicyModel
from gyre.rollout.engines.base import (
    AdmissionClosed,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    LoadReport,
    ProbeResult,
)
from gyre.rollout.engines.moving import Capabilities, Mover, MoveRefused, Prefix
from gyre.rollout.torch_engine.fast import fast
from gyre.rollout.torch_engine.kv import PagedKV, RowTransfer, layout_of
from gyre.rollout.torch_engine.moves import StagedMover
from gyre.rollout.torch_engine.policies import GyrePolicy, Policy, Weights, live_digest, prepare, to_device
from gyre.rollout.torch_engine.probe import predictions_agree
from gyre.rollout.torch_engine.runner import Runner
from gyre.rollout.torch_engine.sampler import Sampled, SamplingRows, sample
from gyre.rollout.torch_engine.scheduler import Scheduler, SchedulerConfig
from gyre.rollout.torch_engine.sequence import Batch
from gyre.rollout.torch_engine.shipping import InPlace, Staged
from gyre.rollout.torch_engine.tiles import TiledRunner

log = logging.getLogger(__name__)

_MAX_TURNS = 64
_IDLE_TURN_S = 0.0001


@dataclass(frozen=True)
class TorchEngineConfig:
    """`dtype` and `device` of weights and cache; the log-softmax is float32 whatever they are.

    `min_interval_s` is the shortest time between the starts of two iterations. A tiny model is through with a few
    sequences before the next ones arrive, and an iteration costs it much the same with one sequence as with many: the
    wait lets a batch gather and the gRPC server have its turns. Models that take longer anyway are not slowed.
    From `thread_from_parameters` parameters on the model runs in a thread of its own. `staging_blocks` of host memory carry
    what moves to and from a device; on a CPU blocks are read where they are. `is_deterministic`: see `torch_engine/tiles.py`.
    """

    scheduler: SchedulerConfig
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    min_interval_s: float = 0.004
    thread_from_parameters: int = 4_000_000
    staging_blocks: int = 1024
    is_deterministic: bool = False


class TorchEngine:
    """`gyre.rollout.engines.base.Engine` on plain PyTorch. Starts without weights and with admission closed."""

    mover: Mover | None

    def __init__(
        self, policy: PolicyConfig | Policy, config: TorchEngineConfig, transfer: RowTransfer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """A `PolicyConfig` is run by this project's decoder. Without a `transfer` that serves memory requests move by
        their tokens alone. `clock` (s) is for leases."""
        self.failed = asyncio.Event()
        self._policy = GyrePolicy(policy) if isinstance(policy, PolicyConfig) else policy
        self._config = config
        self._scheduler = Scheduler(config.scheduler)
        self._runner: Runner | None = None
        self._offloaded: PolicyModel | None = None
        self._weights = Weights(-1, "", "")
        self._admitting = self._verified = self._asleep = False
        self._failure: str | None = None
        self._boundary = asyncio.Lock()  # held while the model runs: whoever takes it stands between two iterations
        self._work = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._driver: asyncio.Task[None] | None = None
        self._populating: asyncio.Future[None] | None = None
        self._transfer = transfer
        layout = layout_of(self._policy.shape, config.dtype, config.scheduler.block_size, config.is_deterministic)
        self._mover = StagedMover(self._scheduler, layout, self._boundary, clock, lambda: self._admitting)
        self.mover = None if transfer is None else self._mover
        self.capabilities = Capabilities() if transfer is None else Capabilities("staged", layout)

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`."""
        holding = self._mover.find(request) if request.ticket else None
        if not self._admitting and (holding is None or not self._verified):
            raise AdmissionClosed(f"admission is closed: {self._why_closed()}")
        ids = request.prompt_ids
        if int(ids.min()) < 0 or int(ids.max()) >= self._policy.shape.vocab_size:
            raise InvalidRequest(f"prompt_ids: every id must be in 0..{self._policy.shape.vocab_size - 1}")
        stream = EventStream()
        self._scheduler.add(request, stream, None if holding is None else holding.chain)
        if holding is not None:
            self._mover.adopted(request)
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="torch-engine")
            self._driver.add_done_callback(self._driver_ended)
        self._work.set()
        return stream

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        return self._scheduler.finish(request_id, Finish("abort"))

    def pause(self) -> None:
        """See `Engine.pause`."""
        self._admitting = False

    def resume(self) -> None:
        """See `Engine.resume`."""
        if self._asleep or not self._verified or self._failure is not None:
            raise AdmissionClosed(f"admission stays closed: {self._why_closed()}")
        self._admitting = True

    async def load_weights(self, version: int, checksum: str, state: Mapping[str, torch.Tensor]) -> None:
        """See `Engine.load_weights`."""
        config = self._config
        model, weights = await asyncio.to_thread(
            prepare, self._policy, version, checksum, state, config.dtype, config.device
        )
        async with self._boundary:
            if self._asleep:
                raise EngineError("weights cannot be loaded while the engine sleeps; wake it first")
            is_first = self._runner is None
            cache = self._new_cache() if self._runner is None else self._runner.cache
            self._runner = self._make_runner(model, cache)
            self._weights = weights
            self._verified = False
            self._mover.void()
            self._scheduler.swap(version, self._config.scheduler.keeps)
            if is_first:
                await self._populate()

    async def export_ticket(self, request_id: str) -> bytes:
        """See `Engine.export_ticket`."""
        raise MoveRefused("this engine moves requests in stages (`mover`)")

    async def export_prefix(self, namespace: str) -> Prefix:
        """See `Engine.export_prefix`."""
        raise MoveRefused("this engine moves prefixes in stages (`mover`)")

    async def release_ticket(self, ticket: bytes) -> None:
        """See `Engine.release_ticket`."""

    async def sleep(self) -> int:
        """See `Engine.sleep`. Weights wait in host memory; the cache is dropped."""
        self._admitting = False
        async with self._boundary:
            if self._asleep:
                return 0
            self._asleep, self._verified = True, False
            self._end_all(Finish("abort", "the engine sleeps"))
            self._mover.void()
            self._scheduler.swap(self._weights.version)
            freed = self._offload()
            await self._populated()  # it sees that the pool is released, and lets go of it
            return freed

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._boundary:
            if not self._asleep:
                return
            self._asleep = False
            if self._offloaded is not None:
                to_device(self._offloaded, self._config.device)
                self._runner = self._make_runner(self._offloaded, self._new_cache())
                self._offloaded = None
                # While the weights come and are proven. Whoever uses the pool before it has its pages waits for some of them.
                self._populating = asyncio.ensure_future(self._populate())

    async def probe(self) -> ProbeResult:
        """See `Engine.probe`."""
        async with self._boundary:
            weights, runner = self._weights, self._runner
            if runner is None or self._asleep:
                return ProbeResult(weights.version, weights.checksum, False, "no weights on the device")
            detail = await asyncio.to_thread(_check, runner, weights.live_digest, self._policy.max_position)
            self._verified = detail == ""
            if not self._verified:
                self._admitting = False
        return ProbeResult(weights.version, weights.checksum, self._verified, detail)

    def load_report(self) -> LoadReport:
        """See `Engine.load_report`."""
        self._mover.sweep()
        scheduler = self._scheduler
        size = self._config.scheduler.block_size
        return LoadReport(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_tokens_free=0 if self._asleep else scheduler.pool.num_available * size,
            kv_tokens_total=scheduler.pool.num_blocks * size,
            version=self._weights.version,
            asleep=self._asleep,
            admitting=self._admitting,
            num_tokens_sampled=scheduler.num_sampled,
            num_tokens_prefilled=scheduler.num_prefilled,
            num_tokens_reused=scheduler.num_reused,
            num_preempted=scheduler.num_preempted,
            num_held=self._mover.num_held,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._admitting = False
        self._end_all(Finish("abort", "the engine is closing"))
        self._mover.void()
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        await self._populated()
        if self._thread is not None:
            self._thread.shutdown()

    async def _drive(self) -> None:
        """The main loop: schedule, run, commit."""
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            while self._scheduler.has_work:
                due = loop.time() + self._config.min_interval_s
                async with self._boundary:
                    await self._iterate()
                await _give_way(loop, due)
            await self._work.wait()

    async def _iterate(self) -> None:
        self._mover.sweep()
        batch = self._scheduler.schedule()
        if batch is None:
            return
        rows = self._scheduler.sampling_rows(batch)
        if self._thread is None:
            sampled = self._model_call(batch, rows)
        else:
            loop = asyncio.get_running_loop()
            sampled = await loop.run_in_executor(self._thread, self._model_call, batch, rows)
        self._scheduler.commit(batch, sampled)

    def _model_call(self, batch: Batch, rows: SamplingRows) -> Sampled:
        assert self._runner is not None
        logits_RV = self._runner.run(batch, self._scheduler.slots)
        return sample(logits_RV, rows) if batch.yields else Sampled([], [], [])

    def _make_runner(self, model: PolicyModel, cache: PagedKV) -> Runner:
        return TiledRunner(model, cache) if self._config.is_deterministic else Runner(fast(model), cache)

    def _new_cache(self) -> PagedKV:
        config = self._config
        if self._thread is None and self._policy.num_parameters >= config.thread_from_parameters:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-model")
        pool, transfer = self._scheduler.pool, self._transfer
        cache = PagedKV(self._policy.shape, pool.num_blocks, pool.block_size, config.dtype, config.device, transfer)
        if transfer is not None:
            in_place = cache.rows is not None
            rows = min(config.staging_blocks, pool.num_blocks)
            self._mover.shipping = InPlace(cache, pool, transfer) if in_place else Staged(cache, transfer, rows)
        return cache

    async def _populate(self) -> None:
        if self._mover.shipping is not None:
            await asyncio.to_thread(self._mover.shipping.populate)

    async def _populated(self) -> None:
        populating, self._populating = self._populating, None
        if populating is not None:
            await populating

    def _offload(self) -> int:
        if self._runner is None:
            return 0
        if self._mover.shipping is not None:
            self._mover.shipping.close()
            self._mover.shipping = None
        freed = self._runner.cache.num_bytes
        on_device = self._config.device.type != "cpu"
        if on_device:
            freed += sum(p.numel() * p.element_size() for p in self._runner.model.parameters())
        self._offloaded, self._runner = self._runner.model, None
        to_device(self._offloaded, torch.device("cpu"))
        if on_device:
            torch.cuda.empty_cache()
        return freed

    def _end_all(self, finish: Finish) -> None:
        for sequence in self._scheduler.sequences:
            self._scheduler.finish(sequence.request.request_id, finish)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        """A failed model call ends every request with its reason instead of leaving readers to wait."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = f"{type(error).__name__}: {error}"
            log.error("the engine failed", exc_info=error)
            self._admitting = self._verified = False
            self._end_all(Finish("error", self._failure))
            self._mover.void()
            self.failed.set()

    def _why_closed(self) -> str:
        if self._failure is not None:
            return f"the engine failed ({self._failure})"
        if self._asleep:
            return "the engine sleeps"
        return "it is paused" if self._verified else "its weights have not been probed"


async def _give_way(loop: asyncio.AbstractEventLoop, due: float) -> None:
    """Waits until `due`, then on as long as the loop has other things to do.

    A request needs several turns of the loop from its first byte to the queue; were each turn to cost an iteration,
    it would miss the batch it could have been part of, and everyone's latency would be many times what it has to be.
    """
    await asyncio.sleep(max(0.0, due - loop.time()))
    for _ in range(_MAX_TURNS):
        before = loop.time()
        await asyncio.sleep(0)
        if loop.time() - before < _IDLE_TURN_S:
            return


def _check(runner: Runner, wanted: str, max_position: int) -> str:
    """What is wrong with the live weights; empty if nothing is."""
    found = live_digest(runner.model)
    if found != wanted:
        return f"live weights digest to {found}, loaded were {wanted}"
    return predictions_agree(runner, max_position)
