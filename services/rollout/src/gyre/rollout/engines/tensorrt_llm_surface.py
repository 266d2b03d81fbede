"""What the installed TensorRT-LLM offers, found by looking at it and never by its version.

Its public index mixes commits, branches and releases, and what reinforcement learning needs came piece by piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

# where no release says itself what can be put to sleep
_MEMORY_TAGS = ("sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra", "model")
NEEDED_CALLS = ("generate_async", "setup_async", "release", "resume", "collective_rpc")


@dataclass(frozen=True)
class Surface:
    """`problem`: why this installation cannot serve; '' if it can. `ticket_fields`: those of `DisaggregatedParams`."""

    problem: str
    arguments: frozenset[str] = frozenset()  # constructor arguments of the engine
    simple_logprobs: bool = False
    logprobs_mode: bool = False
    pauses: bool = False
    sleep_config: bool = False
    ticket_fields: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether KV can be handed to another engine: drain, export as context-only, import as generation-only."""
        wanted = {"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state"}
        return wanted <= set(self.ticket_fields) and "cache_transceiver_config" in self.arguments


def surface_of(package: ModuleType | Any) -> Surface:
    """Looks at the imported package (or at whatever stands for it). Never raises: what is missing is the answer."""
    missing = [name for name in ("AsyncLLM", "SamplingParams", "llmapi") if not hasattr(package, name)]
    if missing:
        return Surface(f"tensorrt_llm has no {', '.join(missing)}")
    engine, sampling = package.AsyncLLM, _names(package.SamplingParams)
    absent = [name for name in NEEDED_CALLS if not hasattr(engine, name)]
    if absent:
        return Surface(f"tensorrt_llm.AsyncLLM has no {', '.join(absent)}")
    if "cache_salt" not in inspect.signature(package.LLM.generate_async).parameters:
        return Surface("generate_async takes no cache_salt, so prefixes of old weights could be hit")
    if "include_stop_str_in_output" not in sampling:
        return Surface("SamplingParams has no include_stop_str_in_output, so stop tokens would be missing")
    arguments = getattr(package.llmapi, "llm_args", None)
    ticket = getattr(getattr(package, "disaggregated_params", None), "DisaggregatedParams", None)
    return Surface(
        problem="",
        arguments=frozenset(_names(getattr(arguments, "TorchLlmArgs", None))),
        simple_logprobs="logprobs_simple_format" in sampling,
        logprobs_mode="logprobs_mode" in sampling,
        pauses=hasattr(engine, "pause_generation") and hasattr(engine, "resume_generation"),
        sleep_config=hasattr(arguments, "SleepConfig"),
        ticket_fields=tuple(_names(ticket)),
    )


def _names(kind: Any) -> list[str]:
    """Fields of a dataclass or of a pydantic model; parameters of anything else."""
    if kind is None:
        return []
    if is_dataclass(kind):
        return [f.name for f in fields(kind)]
    if isinstance(model := getattr(kind, "model_fields", None), Mapping):
        return list(model)
    return list(inspect.signature(kind).parameters)


@dataclass(frozen=True)
class TensorRtSettings:
    """`model`: directory with `config.json` (and tokenizer). Lengths and sizes are in tokens."""

    model: str
    max_position: int
    kv_tokens: int
    max_running: int
    token_budget: int
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    block_size: int = 32
    transfer_timeout_s: float = 8.0  # from a ticket's submission to its first token; the router waits a little longer


def engine_arguments(package: ModuleType | Any, surface: Surface, settings: TensorRtSettings) -> dict[str, Any]:
    """Arguments of `AsyncLLM`, which refuses any it does not know: the optional ones are passed where they exist."""
    api = package.llmapi
    arguments: dict[str, Any] = {
        "model": settings.model,
        "backend": "pytorch",
        "tensor_parallel_size": settings.tensor_parallel,
        "dtype": settings.dtype,
        "max_seq_len": settings.max_position,
        "max_batch_size": settings.max_running,
        "max_num_tokens": settings.token_budget,
        "kv_cache_config": api.KvCacheConfig(
            enable_block_reuse=True, max_tokens=settings.kv_tokens, tokens_per_block=settings.block_size
        ),
    }
    optional: dict[str, Any] = {
        "max_input_len": settings.max_position,  # else prompts beyond 1024 tokens are refused
        "load_format": "dummy",  # weights always come through `update`
        "skip_tokenizer_init": True,
        "ray_worker_extension_cls": "gyre.rollout.engines.tensorrt_llm_worker.Extension",
        "sampler_type": "TorchSampler",
        # with several engines in a run the built-in all-reduce was seen not to converge
        "allreduce_strategy": "NCCL",
        "enable_sleep": True,
    }
    if surface.sleep_config:
        kinds = package.llmapi.llm_args.ExecutorMemoryType
        drop = {kinds.KV_CACHE: "NONE", kinds.MODEL_WEIGHTS_MAIN: "NONE"}  # what sleeps is loaded again
        optional["sleep_config"] = package.llmapi.llm_args.SleepConfig(restore_modes=drop)
        optional.pop("enable_sleep")
    if surface.moves:
        optional["cache_transceiver_config"] = api.CacheTransceiverConfig(
            backend="DEFAULT",
            max_tokens_in_buffer=settings.max_position,
            kv_transfer_timeout_ms=int(settings.transfer_timeout_s * 1000),
        )
    known = surface.arguments
    return arguments | {name: value for name, value in optional.items() if name in known}


def memory_tags(package: ModuleType | Any) -> tuple[list[str], list[str]]:
    """What to release and resume: everything else first, the KV cache last."""
    places = (getattr(package.llmapi, "llm_args", None), getattr(getattr(package, "_torch", None), "virtual_memory", None))
    kinds = next((place.ExecutorMemoryType for place in places if hasattr(place, "ExecutorMemoryType")), None)
    if kinds is None:
        return list(_MEMORY_TAGS), ["kv_cache"]
    weights = [kind.value for kind in kinds if kind is not kinds.KV_CACHE and not kind.value.startswith("_")]
    return weights, [kinds.KV_CACHE.value]
