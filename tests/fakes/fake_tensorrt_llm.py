"""TensorRT-LLM as an adapter sees it: its module, class and field names, its order of events, and its traps.

Written from public sources and from what other adapters work around; nothing of it was checked against the real one.
`make_package()` gives what `import tensorrt_llm` would. The traps, each with a test in test_tensorrt_llm_engine.py:

- `release(["kv_cache"])` keeps the prefix index, `release` of weights drops them;
- `update_weights` waits until nothing is in flight; only its finalising call resets the prefix index;
- the sampler decides which `logprobs` number gives the sampled token's (0, 1, or True with the simple format);
- stop tokens are trimmed from `token_ids` unless asked for, their logprobs never are; a cancelled output has one logprob
  too many; one result object is mutated and yielded again and again;
- prompts beyond `max_input_len` (1024) are refused; arguments that do not exist are refused;
- a generation-only output begins with the token that the context-only one sampled, maybe without its logprob; a transfer
  that is lost never ends.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.tensorrt_llm_worker import extension_of
from tiny_model import TinyModel


@dataclass(frozen=True)
class Flavour:
    """One kind of installation."""

    pauses: bool = True
    simple_logprobs: bool = True
    sleep_config: bool = True
    moves: bool = True
    torch_sampler: bool = True
    trims_apart: bool = False  # #18190 even where the stop token was asked for
    first_logprob_lost: bool = False  # the context side's logprob of the first token is not handed over


@dataclass
class World:
    """What several engines of one fake cluster share, and what a test may look at and break."""

    policy: PolicyConfig
    flavour: Flavour = field(default_factory=Flavour)
    lose_transfers: bool = False
    breaks_update: bool = False
    refuses_context_only: bool = False
    step_s: float = 0.0
    contexts: dict[int, dict[str, Any]] = field(default_factory=dict)  # context request id -> what was prefilled
    engines: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    ids: Any = field(default_factory=lambda: itertools.count(1))


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None

    def __post_init__(self) -> None:
        if self.request_type not in (None, "context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"Unknown request type: {self.request_type}")


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: DisaggregatedParams | None = None


class ExecutorMemoryType(str, Enum):
    SAMPLER = "sampler"
    MODEL_WEIGHTS_MAIN = "model"
    MODEL_EXTRA = "model_extra"
    KV_CACHE = "kv_cache"
    INIT_KV_CACHE = "_no_capture_init_kv_cache"


class RequestOutput:
    """Awaitable and asynchronously iterable; every update is this very object."""

    def __init__(self, request_id: int, prompt_token_ids: list[int], engine: Any, asked: SimpleNamespace) -> None:
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self.asked = asked
        self.cancelled = False
        self._engine = engine
        self._news: asyncio.Queue[None] = asyncio.Queue()

    def abort(self) -> None:
        self.cancelled = True

    def tell(self) -> None:
        self._news.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not (self.finished and self._news.empty()):
            await self._news.get()
            yield self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._result().__await__()

    async def _result(self) -> RequestOutput:
        async for _ in self:
            if self.finished:
                break
        return self


class StockExtension:
    """`tensorrt_llm.llmapi.rlhf_utils.WorkerExtension`. Runs in a worker, here in a thread, and may block."""

    engine: Any
    device_id: int

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        self.engine.wait_idle()
        if ipc_handles is None:
            self.engine.model.load(self.engine.arriving)
            self.engine.arriving = {}
            self.engine.reset_prefix_cache()
            self.engine.model_engine.model = self.engine.model.decoder
            return
        for name, (function, arguments) in ipc_handles[uuid_of(self.device_id)]:
            rebuilt = list(arguments)
            rebuilt[6] = self.device_id
            self.engine.arriving[name] = function(*rebuilt)
        if self.engine.world.breaks_update:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


WORKER_HAS = ("sleep", "wakeup", "submit", "abort_request", "enqueue_request", "setup_engine", "start", "shutdown")


def uuid_of(device_id: int) -> str:
    return f"GPU-{device_id}"


def control_action_decorator(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def waits(self: Any, *args: Any) -> Any:
        self.engine.wait_idle()
        return method(self, *args)

    return waits


class Executor:
    """The scheduler loop: one token of every running request per turn."""

    def __init__(self, world: World, arguments: dict[str, Any]) -> None:
        self.world, self.arguments = world, arguments
        self.model = TinyModel(world.policy)
        self.arriving: dict[str, Any] = {}
        self.running: list[RequestOutput] = []
        self.released: set[str] = set()
        self.model_engine = SimpleNamespace(model=None)
        self.loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def add(self, result: RequestOutput) -> None:
        asked = result.asked
        known, good = self.model.match(asked.salt, result.prompt_token_ids)
        result.cached_tokens = known
        asked.good, asked.arrived = good, True
        params = asked.params
        if params is not None and params.request_type == "generation_only":
            asked.arrived = not self.world.lose_transfers and params.ctx_request_id in self.world.contexts
            output = result.outputs[0]
            output.token_ids += params.first_gen_tokens or []
            if not self.world.flavour.first_logprob_lost:
                output.logprobs += params.first_gen_log_probs or []
            result.cached_tokens = len(result.prompt_token_ids)
        self.running.append(result)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._loop())

    async def idle(self) -> None:
        while self.running:
            await asyncio.sleep(0)

    def wait_idle(self) -> None:
        """From a worker's thread. There is no deadline: the real one has none."""
        asyncio.run_coroutine_threadsafe(self.idle(), self.loop).result()

    def reset_prefix_cache(self) -> None:
        self.world.calls.append("reset_prefix_cache")
        self.model.index.clear()

    def release(self, tags: list[str]) -> None:
        self.released |= set(tags)
        self.model.memory += "kv_cache" in tags  # and the prefix index stays
        if "model" in tags:
            self.model.forget_weights()

    async def _loop(self) -> None:
        while self.running:
            for result in list(self.running):
                self._step(result)
            self.running = [r for r in self.running if not r.finished]
            await asyncio.sleep(self.world.step_s)

    def _step(self, result: RequestOutput) -> None:
        asked, output = result.asked, result.outputs[0]
        if result.cancelled:
            self._end(result, "cancelled")
            return
        if not asked.arrived:
            return
        assert not self.released, f"forward over released memory: {self.released}"
        ids = [*result.prompt_token_ids, *output.token_ids]
        token, logprob, behaviour = self.model.draw(ids, asked.params_of.temperature, asked.params_of.seed, asked.good)
        output.token_ids.append(token)
        output.logprobs += self._logprob(asked, token, logprob if asked.mode == "raw" else behaviour)
        if token in (asked.params_of.stop_token_ids or ()):
            output.stop_reason = token
            self._end(result, "stop")
        elif len(output.token_ids) >= asked.params_of.max_tokens:
            self._end(result, "length")
        else:
            result.tell()

    def _logprob(self, asked: SimpleNamespace, token: int, value: float) -> list[Any]:
        number = asked.params_of.logprobs
        if number is None or number is False:
            return []
        if getattr(asked.params_of, "logprobs_simple_format", False):
            return [value]
        only_sampled = 0 if self.world.flavour.torch_sampler else 1
        if number is True or number == only_sampled:
            return [{token: Logprob(value, 1)}]
        return [] if number < only_sampled else [{(token + 1) % 7: Logprob(value, 1)}]  # the most likely one alone

    def _end(self, result: RequestOutput, reason: str) -> None:
        output, asked = result.outputs[0], result.asked
        self.model.remember(asked.salt, [*result.prompt_token_ids, *output.token_ids], asked.good)
        if reason == "cancelled":
            output.logprobs.append(output.logprobs[-1] if output.logprobs else 0.0)
        trimmed = not asked.params_of.include_stop_str_in_output or self.world.flavour.trims_apart
        if reason == "stop" and trimmed:
            output.token_ids = output.token_ids[:-1]
        if asked.params is not None and asked.params.request_type == "context_only" and reason == "length":
            self._hold(result)
        output.finish_reason = reason
        result.finished = True
        result.tell()

    def _hold(self, result: RequestOutput) -> None:
        output = result.outputs[0]
        self.world.contexts[result.request_id] = {"prompt": list(result.prompt_token_ids)}
        state = b"\x00\xffopaque" + str(result.request_id).encode()
        output.disaggregated_params = DisaggregatedParams(
            "context_only", list(output.token_ids), list(output.logprobs), result.request_id, state
        )


def make_package(world: World) -> Any:
    """`import tensorrt_llm`, of the world's flavour."""
    flavour = world.flavour
    known = ["model", "backend", "tensor_parallel_size", "dtype", "max_seq_len", "max_batch_size", "max_num_tokens",
             "kv_cache_config", "max_input_len", "load_format", "skip_tokenizer_init", "ray_worker_extension_cls",
             "sampler_type", "allreduce_strategy", "orchestrator_type", "ray_placement_config"]  # fmt: skip
    known += ["sleep_config"] if flavour.sleep_config else ["enable_sleep"]
    known += ["cache_transceiver_config"] if flavour.moves else []
    arguments = SimpleNamespace(TorchLlmArgs=SimpleNamespace(model_fields=dict.fromkeys(known)))
    if flavour.sleep_config:
        arguments.ExecutorMemoryType, arguments.SleepConfig = ExecutorMemoryType, SimpleNamespace
    package = SimpleNamespace(
        LLM=make_llm(world, known),
        SamplingParams=make_sampling(flavour),
        llmapi=SimpleNamespace(KvCacheConfig=SimpleNamespace, CacheTransceiverConfig=SimpleNamespace, llm_args=arguments),
        executor=SimpleNamespace(result=SimpleNamespace(Logprob=Logprob)),
    )
    if flavour.moves:
        package.disaggregated_params = SimpleNamespace(DisaggregatedParams=DisaggregatedParams)
    package.AsyncLLM = make_async_llm(package.LLM, flavour)
    return package


def make_sampling(flavour: Flavour) -> type:
    @dataclass(kw_only=True)
    class SamplingParams:
        max_tokens: int = 32
        temperature: float | None = None
        top_k: int | None = None
        top_p: float | None = None
        seed: int | None = None
        end_id: int | None = None
        pad_id: int | None = None
        stop_token_ids: list[int] | None = None
        include_stop_str_in_output: bool = False
        detokenize: bool = True
        logprobs: Any = None
        logprobs_mode: str = "raw"

    if not flavour.simple_logprobs:
        return SamplingParams

    @dataclass(kw_only=True)
    class Newer(SamplingParams):
        logprobs_simple_format: bool = False

    return Newer


def make_llm(world: World, known: list[str]) -> type:
    class LLM:
        def __init__(self, **kwargs: Any) -> None:
            if unknown := set(kwargs) - set(known):
                raise ValueError(f"Extra inputs are not permitted: {sorted(unknown)}")
            self.kwargs = kwargs
            self.closed = False
            self.executor = Executor(world, kwargs)
            worker = extension_of(StockExtension, control_action_decorator, uuid_of)
            if taken := {name for name in dir(worker) if not name.startswith("__")} & set(WORKER_HAS):
                raise ValueError(f"Worker class RayGPUWorker already defines {taken}")
            self.worker = type("RayGPUWorkerWithExtension", (worker,), {})()
            self.worker.engine, self.worker.device_id = self.executor, 0
            world.engines.append(self)

        def generate_async(
            self, inputs: list[int], sampling_params: Any = None, streaming: bool = False,
            disaggregated_params: DisaggregatedParams | None = None, cache_salt: str | None = None,
        ) -> RequestOutput:  # fmt: skip
            if len(inputs) > self.kwargs.get("max_input_len", 1024):
                raise ValueError(f"The length of the prompt ({len(inputs)}) exceeds max_input_len")
            if world.refuses_context_only and disaggregated_params is not None:
                raise RuntimeError("the cache transceiver is wedged")
            asked = SimpleNamespace(params_of=sampling_params, params=disaggregated_params, salt=cache_salt or "",
                                    mode=sampling_params.logprobs_mode)  # fmt: skip
            result = RequestOutput(next(world.ids), list(inputs), self, asked)
            self.executor.add(result)
            return result

        def shutdown(self) -> None:
            self.closed = True
            for result in self.executor.running:
                result.abort()

    return LLM


def make_async_llm(base: type, flavour: Flavour) -> type:
    class AsyncLLM(base):  # type: ignore[misc, valid-type]
        _paused = False

        async def setup_async(self) -> Any:
            # weights of `load_format` dummy
            self.executor.model.load(Decoder.create(self.executor.world.policy, 999).state_dict())
            self.executor.model_engine.model = self.executor.model.decoder
            return self

        async def release(self, tags: list[str]) -> None:
            self.executor.world.calls.append(f"release {','.join(tags)}")
            assert not self.executor.running, "released while requests are in flight"
            self.executor.release(tags)

        async def resume(self, tags: list[str]) -> None:
            self.executor.released -= set(tags)

        async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            self.executor.world.calls.append(method)
            return [await asyncio.to_thread(getattr(self.worker, method), *args)]

        def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
            if self._paused:
                raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
            return super().generate_async(*args, **kwargs)

    if not flavour.pauses:
        return AsyncLLM

    class Newer(AsyncLLM):
        async def pause_generation(self) -> None:
            self._paused = True
            for result in self.executor.running:
                result.abort()
            await self.executor.idle()

        async def resume_generation(self) -> None:
            self._paused = False

    return Newer
