"""TensorRT-LLM behind our contract: its `AsyncLLM` in this process, its GPU workers as Ray actors of their own.

It has never been run here, only against a fake that copies its names and its traps. What the adapter does about them:

- a stop token is in the output only if asked for, and then its logprob may still be trimmed apart: counted per token;
- how many logprobs to ask for depends on the sampler: tried at start, until exactly the sampled token's comes back;
- an update waits for requests that may run for an hour: everything is aborted first, its tokens are kept;
- releasing the KV cache keeps the index of reusable prefixes, and a hit then reads garbage: reset before release;
- a moved request's first token was sampled by the source: it is in the destination's output again, and skipped there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gyre.rollout.engines.host import Call, Ended, Exported, HostError, Piece
from gyre.rollout.engines.moving import Capabilities, MoveRefused
from gyre.rollout.engines.tensorrt_llm_surface import Surface, TensorRtSettings, engine_arguments, memory_tags, surface_of
from gyre.rollout.engines.tensorrt_llm_tickets import Ticket, params_of, tokens_digest, with_logprobs

_LOGPROBS_TO_TRY: tuple[Any, ...] = (0, 1, True)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
_PROBE_IDS = [1, 2, 3, 4]
# what its executor raises towards a caller: RequestError and ExecutorError are RuntimeErrors, bad arguments ValueErrors
_FAULTS = (RuntimeError, ValueError, TypeError, AssertionError)


class TensorRtHost:
    """`gyre.rollout.engines.host.Host`. `package` is the imported `tensorrt_llm`."""

    def __init__(self, package: ModuleType | Any, settings: TensorRtSettings) -> None:
        surface = surface_of(package)
        if surface.problem:
            raise HostError(surface.problem)
        self.failed = asyncio.Event()
        self._package = package
        self._surface: Surface = surface
        self._settings = settings
        self._layout = f"tensorrt_llm/{settings.model}/{settings.dtype}/{settings.block_size}"
        self.capabilities = Capabilities("ticket" if surface.moves else "replay", self._layout)
        self._llm: Any = None
        self._logprobs: Any = None
        self._era = 0  # releases of the cache: part of every salt, so that even a reset that failed lets nothing be hit
        self._results: dict[str, Any] = {}  # by call id
        self._held: dict[str, Any] = {}  # by the prompt's digest: what was exported and may be dropped

    async def start(self) -> None:
        """See `Host.start`."""
        arguments = engine_arguments(self._package, self._surface, self._settings)
        try:
            self._llm = self._package.AsyncLLM(**arguments)
            await self._llm.setup_async()
        except _FAULTS as error:
            self.failed.set()
            raise HostError(f"TensorRT-LLM did not start: {error}") from error
        self._logprobs = await self._logprobs_to_ask_for()

    async def generate(self, call: Call) -> AsyncIterator[Piece | Ended]:
        """See `Host.generate`."""
        params, head = None, call.prompt_ids[:0]
        if call.ticket:
            try:
                params = self._imported(call)
            except MoveRefused as error:
                yield Ended("no_ticket", str(error))
                return
            head = call.prompt_ids[-1:]
        try:
            prompt = call.prompt_ids[: len(call.prompt_ids) - len(head)]
            result = self._submit(call, prompt, call.max_tokens + len(head), params)
        except _FAULTS as error:
            yield Ended("error", str(error))
            return
        self._results[call.call_id] = result
        try:
            async for part in self._parts(result, head):
                yield part
        finally:
            self._results.pop(call.call_id, None)
            if not result.finished:  # whoever went away must not leave it running
                result.abort()

    async def abort(self, call_id: str) -> None:
        """See `Host.abort`."""
        if (result := self._results.get(call_id)) is not None:
            result.abort()

    async def hold(self) -> None:
        """See `Host.hold`."""
        if self._surface.pauses:
            await self._ask(self._llm.pause_generation())
        else:
            for result in list(self._results.values()):
                result.abort()
        await self._rpc("gyre_idle")

    async def go_on(self) -> None:
        """See `Host.go_on`."""
        if self._surface.pauses:
            await self._ask(self._llm.resume_generation())

    async def update(self, version: int, directory: Path) -> str:
        """See `Host.update`."""
        return "/".join(await self._rpc("gyre_update", str(directory)))

    async def fingerprint(self) -> str:
        """See `Host.fingerprint`."""
        return "/".join(await self._rpc("gyre_fingerprint"))

    async def reset_cache(self) -> None:
        """See `Host.reset_cache`."""
        await self._rpc("gyre_reset_cache")
        self._held.clear()

    async def release(self) -> int:
        """See `Host.release`."""
        weights, cache = memory_tags(self._package)
        before = sum(await self._rpc("gyre_free_bytes"))
        await self._rpc("gyre_reset_cache")  # once more: after it nothing may stand between this and the release
        self._era += 1
        await self._ask(self._llm.release(weights + cache))
        return max(0, sum(await self._rpc("gyre_free_bytes")) - before)

    async def restore(self) -> bool:
        """See `Host.restore`. Weights were dropped, so they are never what they were."""
        weights, cache = memory_tags(self._package)
        await self._ask(self._llm.resume(weights + cache))
        return False

    async def export(self, call: Call) -> Exported:
        """See `Host.export`: a context-only request prefills (from its own cache) and samples one token."""
        if not self._surface.moves:
            raise MoveRefused("this TensorRT-LLM has no disaggregated parameters or no cache transceiver")
        params = self._package.disaggregated_params.DisaggregatedParams(request_type="context_only")
        try:
            result = self._submit(call, call.prompt_ids, 1, params, streaming=False)
            self._results[call.call_id] = result
            async with asyncio.timeout(self._settings.transfer_timeout_s):
                await result
        except (*_FAULTS, TimeoutError) as error:
            raise MoveRefused(f"TensorRT-LLM did not export: {error!r}") from error
        finally:
            self._results.pop(call.call_id, None)
        output = result.outputs[0]
        ids, logprobs, problem = tokens_of(output, skip=0, last=True)
        given = output.disaggregated_params
        if problem or len(ids) != 1 or given is None:
            raise MoveRefused(f"TensorRT-LLM exported {len(ids)} tokens and {type(given).__name__}; {problem}")
        digest = tokens_digest(call.prompt_ids)
        self._held[digest] = result
        ticket = Ticket(self._layout, call.salt, digest, ids[0], params_of(given))
        return Exported(ids[0], logprobs[0], ticket.to_bytes())

    async def drop(self, ticket: bytes) -> None:
        """See `Host.drop`. What is not pulled is freed by the transfer timeout at the latest."""
        with contextlib.suppress(MoveRefused):
            if (result := self._held.pop(Ticket.from_bytes(ticket).tokens, None)) is not None:
                result.abort()

    async def close(self) -> None:
        """See `Host.close`."""
        if self._llm is not None:
            self._llm.shutdown()

    # one request

    def _submit(
        self, call: Call, prompt: Sequence[int], max_tokens: int, params: Any, *, streaming: bool = True,
        logprobs: Any = None,
    ) -> Any:  # fmt: skip
        asked = self._logprobs if logprobs is None else logprobs
        greedy = call.temperature == 0
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": call.temperature,
            "top_k": 1 if greedy else 0,
            "top_p": 1.0,
            "seed": call.seed,
            "end_id": -1,  # only the stop tokens we name stop it
            "pad_id": 0,
            "stop_token_ids": list(call.stop_token_ids) or None,
            "include_stop_str_in_output": True,
            "detokenize": False,
            "logprobs": asked,
        }
        if self._surface.simple_logprobs and asked is True:
            fields["logprobs_simple_format"] = True
        if self._surface.logprobs_mode:
            fields["logprobs_mode"] = "raw"  # of the policy, before temperature
        return self._llm.generate_async(
            list(prompt), sampling_params=self._package.SamplingParams(**fields), streaming=streaming,
            disaggregated_params=params, cache_salt=f"{self._era}/{call.salt}",
        )  # fmt: skip

    async def _parts(self, result: Any, head: list[int]) -> AsyncIterator[Piece | Ended]:
        """One result object comes again and again, longer each time: what is new is counted here.

        `head` was sampled elsewhere and begins its tokens, and the KV before it has to arrive within the deadline.
        """
        seen, updates, skip = 0, aiter(result), len(head)
        while True:
            try:
                wait_s = self._settings.transfer_timeout_s if skip and not seen else None
                async with asyncio.timeout(wait_s):
                    update = await anext(updates)
            except StopAsyncIteration:
                yield Ended("error", "TensorRT-LLM's stream ended without a reason")
                return
            except TimeoutError:
                result.abort()
                yield Ended("no_ticket", f"the KV did not arrive within {self._settings.transfer_timeout_s} s")
                return
            except _FAULTS as error:
                yield Ended("no_ticket" if skip and not seen else "error", str(error))
                return
            output = update.outputs[0]
            if output.token_ids and output.token_ids[:skip] != head:
                yield Ended("no_ticket", f"the output begins with {output.token_ids[:skip]}, not with {head}")
                return
            ids, logprobs, problem = tokens_of(output, skip, last=output.finish_reason is not None)
            if len(ids) > seen:
                yield Piece(ids[seen:], logprobs[seen:])
                seen = len(ids)
            if problem or output.finish_reason is not None:
                reused = int(getattr(update, "cached_tokens", 0) or 0)
                reason = "error" if problem else _REASONS.get(output.finish_reason, "error")
                yield Ended(reason, problem or f"finish_reason {output.finish_reason}", reused)  # type: ignore[arg-type]
                return

    def _imported(self, call: Call) -> Any:
        """The parameters of a generation-only request. Raises MoveRefused if the ticket is of no use for this call."""
        ticket = Ticket.from_bytes(call.ticket)
        if (ours := self._held.pop(ticket.tokens, None)) is not None:
            ours.abort()
            raise MoveRefused("it was exported here, so this engine's own prefixes have it")
        problem = "this TensorRT-LLM cannot import KV" if not self._surface.moves else ""
        problem = problem or ticket.fits(self._layout, call.salt, call.prompt_ids)
        if problem:
            raise MoveRefused(problem)
        fields = {name: value for name, value in ticket.params.items() if name in self._surface.ticket_fields}
        if "first_gen_log_probs" in fields:
            entry = self._package.executor.result.Logprob
            fields["first_gen_log_probs"] = with_logprobs(fields["first_gen_log_probs"], entry)
        kind = self._package.disaggregated_params.DisaggregatedParams
        try:
            return kind(request_type="generation_only", **fields)
        except _FAULTS as error:
            raise MoveRefused(f"TensorRT-LLM refuses the ticket: {error}") from error

    async def _logprobs_to_ask_for(self) -> Any:
        """Which number gives the sampled token's logprob depends on sampler and release; it is tried, once."""
        order = (True, 0, 1) if self._surface.simple_logprobs else _LOGPROBS_TO_TRY
        problems = []
        for number in order:
            call = Call("0" * 32, _PROBE_IDS, 2, 0.0, (), 0, "probe")
            try:
                result = self._submit(call, call.prompt_ids, 2, None, streaming=False, logprobs=number)
                await result
            except _FAULTS as error:
                problems.append(f"{number!r}: {error}")
                continue
            ids, _, problem = tokens_of(result.outputs[0], skip=0, last=True)
            if not problem and len(ids) == 2:
                return number
            problems.append(f"{number!r}: {problem or f'{len(ids)} tokens'}")
        raise HostError(f"TensorRT-LLM gives no logprob of the sampled token: {'; '.join(problems)}")

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        return await self._ask(self._llm.collective_rpc(method, args=arguments))

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except _FAULTS as error:
            raise HostError(f"TensorRT-LLM: {error}") from error


def tokens_of(output: Any, skip: int, last: bool) -> tuple[list[int], list[float], str]:
    """Tokens beyond the first `skip`, their logprobs, and what is wrong with them.

    While it runs, logprobs may lag behind tokens; what has none yet is left for the next update. At the end both must be
    of one length, except where it was cancelled: tokens without a logprob were never ours, and the reverse is no token.
    """
    ids, entries = list(output.token_ids or []), list(output.logprobs or [])
    if skip and len(entries) == len(ids) - skip:  # the source's logprobs were not handed over: those here begin later
        entries = [None] * skip + entries
    if last and output.finish_reason != "cancelled" and len(ids) != len(entries):
        return [], [], f"{len(ids)} token ids but {len(entries)} logprobs"
    logprobs: list[float] = []
    for token_id, entry in list(zip(ids, entries, strict=False))[skip:]:
        value = entry.get(token_id) if isinstance(entry, dict) else entry
        value = getattr(value, "logprob", value)
        if not isinstance(value, float | int):
            return [], [], f"no logprob of the sampled token {token_id}"
        logprobs.append(float(value))
    return ids[skip : skip + len(logprobs)], logprobs, ""
