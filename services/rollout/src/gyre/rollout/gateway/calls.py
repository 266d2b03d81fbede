"""The journey of one call: request -> prompt -> engine -> record -> answer.

The record is durable (archive, then the service's journal and outbox in one commit) before the answer exists; nobody
can be told a token that could still be lost.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np
from gyre.contracts.errors import EngineError, GyreError
from gyre.contracts.events import CallEvidence, CallRecorded, call_fault
from gyre.contracts.ids import call_id
from gyre.rollout.attempt import EngineRefused, Job, Output
from gyre.rollout.gateway.archive import ArchivedCall, CallArchive
from gyre.rollout.gateway.context import Place
from gyre.rollout.gateway.detokenize import Detokenizer
from gyre.rollout.gateway.evidence import Evidence
from gyre.rollout.gateway.messages import (
    Answer,
    CallRefused,
    ChatRequest,
    Message,
    StopReason,
    Usage,
    chains,
)
from gyre.rollout.gateway.render import Prompt, Renderer
from gyre.rollout.gateway.session import PendingCall, Session, request_key
from gyre.rollout.gateway.tools import ToolFormat, parse_tool_calls, safe_length
from gyre.rollout.router import Router
from gyre.runtime import telemetry
from gyre.runtime.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What the run fixes for every call."""

    model: str = "policy"
    max_tokens: int = 512  # cap on the output of one call
    max_context: int = 8192  # prompt + output
    tool_format: ToolFormat = "hermes"
    trace: bool = False  # a span for each call


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    """One call on its way: `keys` are the chains of its messages, `key` names it, `serial` counts the session's."""

    session: Session
    request: ChatRequest
    keys: list[bytes]
    key: bytes
    evidence: Evidence
    serial: int
    pending: PendingCall


Commit = Callable[[ArchivedCall], Awaitable[bool]]
FireCallLimit = Callable[[str], Awaitable[None]]


class Calls:
    """Serves the calls of all sessions.

    `commit` makes a record durable in the service and says whether it counts: an execution that has ended takes none.
    `fire_call_limit` tells the executor that an execution waits on the call at which it is to end.
    """

    def __init__(self, settings: CallSettings, renderer: Renderer, router: Router, archive: CallArchive,
                 commit: Commit, fire_call_limit: FireCallLimit, clock: Clock) -> None:
        self.settings = settings
        self._renderer = renderer
        self._router = router
        self._archive = archive
        self._commit = commit
        self._fire_call_limit = fire_call_limit
        self._clock = clock
        self._stop_ids = frozenset(renderer.tokenizer.stop_ids)
        self.num_joined = 0
        self.num_replayed_answers = 0
        self.num_faulty = 0  # calls that were not recorded because their parts did not fit together

    def start(self, session: Session, request: ChatRequest, evidence: Evidence) -> tuple[bytes, PendingCall]:
        """The call that answers `request`: a new one, the one in flight, or one that is already answered.

        Returns:
            (request key, call); `Session.delivered(key)` is to be called once the answer is written.

        Raises:
            CallRefused: the execution has ended or has too many calls in flight.
        """
        session.check_open()
        request = session.read(request)
        keys = chains(request)
        key = request_key(request, keys)
        pending = session.pending.get(key)
        if pending is not None:
            self.num_joined += 1
        else:
            pending = self._recorded(session, key, evidence) or self._launch(session, request, keys, key, evidence)
        pending.wants_text |= request.stream
        return key, pending

    def count(self, session: Session, request: ChatRequest) -> int:
        """Tokens of the prompt that `request` would have now. Raises CallRefused."""
        session.check_open()
        request = session.read(request)
        earlier, num_shared = session.earlier(chains(request))
        return len(self._renderer.prompt(request, session.tree, earlier, num_shared).ids)

    def _recorded(self, session: Session, key: bytes, evidence: Evidence) -> PendingCall | None:
        answer = session.recorded_answer(key, evidence.is_retry)
        if answer is None:
            return None
        self.num_replayed_answers += 1
        pending = PendingCall(answer.id, answer.created)
        pending.usage = answer.usage
        pending.settle(answer)
        return pending

    def _launch(self, session: Session, request: ChatRequest, keys: list[bytes], key: bytes,
                evidence: Evidence) -> PendingCall:
        if len(session.pending) >= session.limits.max_in_flight:
            raise CallRefused(429, f"{len(session.pending)} calls of this execution are in flight, at most "
                                   f"{session.limits.max_in_flight}", "rate_limit_error", "rate_limit_exceeded")
        serial = session.num_recorded + len(session.pending)
        pending = PendingCall(f"{session.spec.execution}-{serial:04d}", int(self._clock.now()))
        session.pending[key] = pending
        pending.task = asyncio.create_task(self._run(_Ask(session, request, keys, key, evidence, serial, pending)))
        return pending

    async def _run(self, ask: _Ask) -> None:
        if not self.settings.trace:
            return await self._serve(ask)
        with telemetry.span(f"chat {self.settings.model}", kind=telemetry.SpanKind.SERVER, gen_ai__operation__name="chat",
                            gen_ai__request__model=self.settings.model, gyre__execution=ask.session.spec.execution):
            return await self._serve(ask)

    async def _serve(self, ask: _Ask) -> None:
        """One call from end to end; whatever happens, it is settled."""
        answer, error = None, None
        spec = ask.session.spec
        try:
            if spec.timeout_calls is not None and ask.serial + 1 >= spec.timeout_calls:
                await self._fire_call_limit(spec.execution)
                await asyncio.Event().wait()  # until the session is closed, which cancels this task
            answer = await self._call(ask)
        except CallRefused as refused:
            error = refused
        except EngineRefused as refused:
            error = CallRefused(400, str(refused))
        except EngineError as failed:
            error = CallRefused(503, str(failed), "server_error", "engine_unavailable")
        except GyreError as failed:
            log.exception("call of %s", spec.execution)
            error = CallRefused(500, str(failed), "server_error", "internal_error")
        finally:
            if ask.session.pending.get(ask.key) is ask.pending:
                del ask.session.pending[ask.key]
            ask.session.num_errors += error is not None
            if answer is None and error is None:  # the execution was ended: not an error of the harness
                error = CallRefused(500, "the call was cut off", "server_error", "internal_error")
            ask.pending.settle(answer, error)

    async def _call(self, ask: _Ask) -> Answer:
        session, pending = ask.session, ask.pending
        earlier, num_shared = session.earlier(ask.keys)
        prompt = self._renderer.prompt(ask.request, session.tree, earlier, num_shared)
        pending.usage = Usage(len(prompt.ids), 0, prompt.place.keep_len)
        shown = session.shown(ask.request.messages, earlier, prompt.place)
        job = self._job(ask, prompt)
        uses_tools = bool(ask.request.tools) and self.settings.tool_format == "hermes"
        detokenizer = Detokenizer(self._renderer.tokenizer, self._stop_ids)

        def on_tokens(ids: list[int]) -> None:
            detokenizer.push(ids, pending.wants_text)
            if pending.wants_text:
                text = detokenizer.text
                pending.show(text[:safe_length(text)] if uses_tools else text)

        output = Output(on_tokens)
        await self._router.generate(job, output, session.stall)
        text = detokenizer.finish()
        content, tool_calls = parse_tool_calls(text, pending.answer_id) if uses_tools else (text, ())
        message = Message("assistant", content, tool_calls)
        answer = Answer(pending.answer_id, "", message, _stop_reason(output, message),
                        replace(pending.usage, num_completion=len(output.ids)), pending.created)
        async with session.commit_lock:
            return await self._keep(ask, answer, prompt, shown, job, output)

    async def _keep(self, ask: _Ask, answer: Answer, prompt: Prompt, shown: CallEvidence, job: Job,
                    output: Output) -> Answer:
        """Make the call durable and remember it. One at a time for each session, so that indices have no gaps."""
        session, spec = ask.session, ask.session.spec
        answer = replace(answer, call=call_id(spec.execution, session.num_recorded))
        # Another call may have been recorded meanwhile, which this prompt continues further.
        place = session.tree.locate(prompt.ids, prompt.place.inside)
        chain = session.tree.extended(place, prompt.ids, np.asarray(output.ids, np.int32))
        record = self._record(ask, answer.call, prompt, place, chain.hexdigest(), shown, job, output)
        archived = session.archived(record, answer, ask.keys, ask.key, self._renderer.num_opening, self._clock.now())
        await self._archive.put(archived)
        session.deliveries.saved(len(archived.delivered))
        session.provenance.saved(len(archived.answered))
        session.deliveries.recorded(answer.call)  # from here on it may count, even if the execution is ended meanwhile
        if not await self._commit(archived):
            raise CallRefused(409, f"execution {spec.execution} has ended", "conflict_error", "execution_ended")
        session.remember(archived, prompt.ids, place, chain)
        return answer

    def _record(self, ask: _Ask, call: str, prompt: Prompt, place: Place, digest: str, shown: CallEvidence, job: Job,
                output: Output) -> CallRecorded:
        """The record of a call whose prompt hangs at `place`. Raises EngineError if the engine's parts do not fit."""
        session, said = ask.session, ask.evidence
        ids, logprobs, behaviour = output.arrays()
        record = CallRecorded(
            execution=session.spec.execution, group=session.spec.group, call=call, index=session.num_recorded,
            base_call=place.base.call if place.base else None, keep_len=place.keep_len, prompt_len=len(prompt.ids),
            prompt_delta=np.ascontiguousarray(prompt.ids[place.keep_len:]), output_ids=ids, logprobs=logprobs,
            behaviour_logprobs=behaviour, spans=output.spans(), finish_reason=output.finish or "stop",
            digest=digest, model=self.settings.model, role_class=said.role_class,
            lineage=said.lineage, sampling=job.sampling, cell=output.cell,
            evidence=replace(shown, tags=dict(said.tags), continues=place.continues))
        fault = call_fault(record)
        if fault:
            self.num_faulty += 1
            log.error("%s: not recorded: %s", call, fault)
            raise EngineError(f"{call}: the engine's answer does not fit together: {fault}")
        return record

    def _job(self, ask: _Ask, prompt: Prompt) -> Job:
        room = self.settings.max_context - len(prompt.ids)
        if room < 1:
            # Harnesses look for this wording to know that they should compact.
            limit = self.settings.max_context
            raise CallRefused(400, f"This model's maximum context length is {limit} tokens. However, "
                                   f"your messages resulted in {len(prompt.ids)} tokens; the prompt is too long.",
                              code="context_length_exceeded")
        spec = ask.session.spec
        sampling = replace(spec.sampling, seed=_seed(spec.seed, ask.serial))
        wish = self.settings.max_tokens if ask.request.max_tokens is None else ask.request.max_tokens
        # An engine may still run a call of a gateway that died: the time makes the id another one.
        request_id = f"{spec.execution}-{ask.serial:04d}-{int(self._clock.now() * 1e6):x}"
        return Job(request_id, spec.execution, prompt.ids,
                   min(wish, self.settings.max_tokens, room), sampling, self._renderer.tokenizer.stop_ids)


def _stop_reason(output: Output, message: Message) -> StopReason:
    if message.tool_calls:
        return "tool_calls"
    return "length" if output.finish == "length" else "stop"


def _seed(seed: int, serial: int) -> int:
    """The sampling seed of a call: 63 bits, the same for the same place in the same execution."""
    digest = hashlib.blake2b(f"{seed}/{serial}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
