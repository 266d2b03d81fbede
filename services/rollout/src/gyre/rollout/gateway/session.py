"""One execution as the gateway knows it: its secret, contexts, answers, calls in flight and limits.

Invariants kept here:
- a request that is identical to one in flight joins it; there is one call;
- a request that is identical to one whose answer was not delivered gets that answer; there is one record;
- an answer counts as delivered once it was written to a connection that lived, or a later request shows it;
- the index of a call is the number of calls recorded before it, so indices have no gaps and a base comes first;
- a session that is closed answers nothing any more.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from gyre.contracts.digest import TokenChain
from gyre.contracts.events import CallEvidence, CallRecorded, Sampling
from gyre.rollout.gateway.archive import ArchivedCall, CallArchive
from gyre.rollout.gateway.context import Node, Place, TokenTree
from gyre.rollout.gateway.delivery import Deliveries
from gyre.rollout.gateway.messages import Answer, CallRefused, ChatRequest, Message, Usage, chain_next
from gyre.rollout.gateway.provenance import Provenance
from gyre.rollout.gateway.restore import SampledToolCalls

SECRET_PREFIX = "gyre."
NOTHING_SHOWN = CallEvidence()


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one execution's use of the gateway."""

    max_in_flight: int = 16  # distinct calls at once
    max_answers: int = 256  # answers kept for retries


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session serves. `timeout_calls`: the n-th call never gets an answer, its execution ends there."""

    execution: str
    group: str
    seed: int
    sampling: Sampling
    timeout_calls: int | None = None


class StallMeter:
    """How long calls of one execution waited while no engine admitted; overlapping waits count once.

    What was taken is the core's to remember; the meter knows what is not yet.
    """

    __slots__ = ("_num_waiting", "_since", "_waited_s")

    def __init__(self) -> None:
        self._num_waiting = 0
        self._since = 0.0
        self._waited_s = 0.0

    def begin(self, now: float) -> None:
        if self._num_waiting == 0:
            self._since = now
        self._num_waiting += 1

    def end(self, now: float) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._waited_s += max(0.0, now - self._since)

    def untaken_s(self, now: float) -> float:
        """Seconds stalled since the last `take`, the current wait included."""
        return self._waited_s + (max(0.0, now - self._since) if self._num_waiting else 0.0)

    def take(self, now: float) -> float:
        """The seconds stalled since the last `take`; they count from here on as taken."""
        taken = self.untaken_s(now)
        self._waited_s, self._since = 0.0, now
        return taken


class PendingCall:
    """A call on its way. Any number of requests may wait for it; text that may be shown grows until it is done.

    usage: what its prompt came to, once that was rendered.
    """

    def __init__(self, answer_id: str, created: int) -> None:
        self.answer_id = answer_id
        self.created = created
        self.wants_text = False
        self.safe_text = ""
        self.usage = Usage(0, 0)
        self.result: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._grown: asyncio.Event = asyncio.Event()

    def show(self, text: str) -> None:
        """Let streaming requests see `text`, which extends what they saw before."""
        if len(text) > len(self.safe_text):
            self.safe_text = text
            self._grown.set()

    def settle(self, answer: Answer | None, error: CallRefused | None = None) -> None:
        """End the call; whoever waits is woken."""
        if not self.result.done():
            if error is not None:
                self.result.set_exception(error)
                self.result.exception()  # nobody may be waiting; that is no error of the loop
            elif answer is not None:
                self.result.set_result(answer)
        self._grown.set()

    async def growth(self, num_seen: int) -> str:
        """Text beyond `num_seen` characters; empty once the call is done."""
        while len(self.safe_text) <= num_seen and not self.result.done():
            self._grown.clear()
            await self._grown.wait()
        return self.safe_text[num_seen:]


@dataclass(slots=True)
class Session:
    """The gateway's memory of one execution."""

    spec: SessionSpec
    limits: SessionLimits = field(default_factory=SessionLimits)
    tree: TokenTree = field(default_factory=TokenTree)
    stall: StallMeter = field(default_factory=StallMeter)
    num_recorded: int = 0
    num_errors: int = 0
    closed: bool = False
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    deliveries: Deliveries = field(default_factory=Deliveries)
    provenance: Provenance = field(default_factory=Provenance)
    pending: dict[bytes, PendingCall] = field(default_factory=dict)
    _tool_calls: SampledToolCalls = field(default_factory=SampledToolCalls)
    _transcripts: dict[bytes, Node] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _answers: dict[bytes, Answer] = field(default_factory=dict)

    def check_open(self) -> None:
        """Raises CallRefused once the execution has ended."""
        if self.closed:
            raise CallRefused(409, f"execution {self.spec.execution} has ended", "conflict_error", "execution_ended")

    def read(self, request: ChatRequest) -> ChatRequest:
        """The request with its tool calls as they were sampled; results among its messages are noted."""
        messages = self._tool_calls.restored(request.messages)
        self.provenance.close_answered(messages)
        return request if messages is request.messages else replace(request, messages=messages)

    def recorded_answer(self, request_key: bytes, is_retry: bool) -> Answer | None:
        """The answer a repeated request is owed: undelivered, or the request says that it is a retry."""
        answer = self._answers.get(request_key)
        return answer if answer and (is_retry or self.deliveries.is_waiting(answer.call)) else None

    def delivered(self, request_key: bytes) -> None:
        """The answer was written to its connection; the same request now asks for another sample."""
        answer = self._answers.get(request_key)
        if answer:
            self.deliveries.reached(answer.call)

    def shown(self, messages: Sequence[Message], earlier: Node | None, place: Place) -> CallEvidence:
        """What a request shows of earlier calls, without tags. What it shows or goes on with has reached the harness.

        `earlier`: the call whose messages and answer begin the request; `place`: where its prompt hangs. A request without
        an answer in it is looked at also where its prompt was seen before: agents that are sent with the same words, or
        summaries that say the same, open contexts of their own.
        """
        if earlier is not None:
            self.deliveries.reached(earlier.call)
        opens = not place.continues or all(m.role != "assistant" for m in messages)
        found = self.provenance.look(messages) if opens and self._nodes else NOTHING_SHOWN
        self._note_shown(place.base, place.keep_len, found)
        return found

    def _note_shown(self, base: Node | None, keep_len: int, found: CallEvidence) -> None:
        if base is not None and keep_len >= base.length:
            self.deliveries.reached(base.call)
        self.deliveries.reached(*found.quotes, *filter(None, (found.replays,)))

    def earlier(self, keys: list[bytes]) -> tuple[Node | None, int]:
        """The latest call whose messages and answer begin the request with chain `keys`, and how many they are."""
        for number in range(len(keys) - 1, 0, -1):
            node = self._transcripts.get(keys[number])
            if node is not None:
                return node, number
        return None, 0

    def recall(self, call: ArchivedCall) -> None:
        """Take a call of an earlier life of the gateway, whose prompt is known as a delta only.

        What that life knew of deliveries beyond what it archived is lost, unless the calls themselves show it.
        """
        record = call.record
        base = self._nodes[record.base_call].ids()[:record.keep_len] if record.base_call else record.prompt_delta[:0]
        prompt = np.concatenate((base, record.prompt_delta)).astype(np.int32, copy=False)
        place = self.tree.locate(prompt)
        self.provenance.close_tool_calls(call.answered)
        self.deliveries.reached(*call.delivered)
        self._note_shown(place.base, place.keep_len, record.evidence)
        self.deliveries.recorded(record.call)
        self.remember(call, prompt, place, self.tree.extended(place, prompt, record.output_ids))
        self.deliveries.saved()
        self.provenance.saved()

    def archived(self, record: CallRecorded, answer: Answer, keys: list[bytes], request_key: bytes, num_opening: int,
                 now: float) -> ArchivedCall:
        """A new call as it is kept on the disk, with all that happened since the one before it."""
        return ArchivedCall(record, answer, request_key, transcript_key(keys, answer), self.stall.take(now),
                            self.deliveries.news, self.provenance.answered, num_opening)

    def remember(self, call: ArchivedCall, prompt: np.ndarray, place: Place, chain: TokenChain) -> None:
        """Take a recorded call into contexts, answers and tool calls."""
        record = call.record
        node = self.tree.add(record.call, place, prompt, record.output_ids, chain, call.num_opening)
        self._nodes[record.call] = node
        self._transcripts[call.transcript_key] = node
        self._answers[call.request_key] = call.answer
        while len(self._answers) > self.limits.max_answers:
            self._answers.pop(next(iter(self._answers)))
        self._tool_calls.add(call.answer.message.tool_calls)
        self.provenance.heard(record.call, call.answer.message)
        self.num_recorded = record.index + 1

    def close(self) -> None:
        """Refuse everything from now on and wake whoever waits."""
        self.closed = True
        error = CallRefused(409, f"execution {self.spec.execution} has ended", "conflict_error", "execution_ended")
        for call in list(self.pending.values()):
            if call.task is not None:
                call.task.cancel()
            call.settle(None, error)
        self.pending.clear()


def request_key(request: ChatRequest, keys: list[bytes]) -> bytes:
    """Names a request: its messages, tools and limits, not whether it is streamed. `keys` = `chains(request)`."""
    return keys[-1] + (request.max_tokens or 0).to_bytes(8, "little")


def transcript_key(keys: list[bytes], answer: Answer) -> bytes:
    """Names the messages of a request with chain `keys` followed by the answer to it."""
    return chain_next(keys[-1], answer.message)


class Sessions:
    """Live sessions by execution, and the secrets that open them.

    A secret is derived from the gateway's key, so that a harness which outlives the gateway can still be recognised.
    """

    def __init__(self, key: bytes, archive: CallArchive, limits: SessionLimits | None = None,
                 ended: Callable[[str], None] = lambda _: None) -> None:
        """`ended` is told of every execution that will make no call any more, maybe more than once."""
        self._key = key
        self._ended = ended
        self._archive = archive
        self._limits = limits or SessionLimits()
        self._live: dict[str, Session] = {}

    def secret(self, execution: str) -> str:
        """The API key of an execution."""
        mac = hmac.new(self._key, execution.encode(), hashlib.blake2b).hexdigest()[:48]
        return f"{SECRET_PREFIX}{execution}.{mac}"

    def open(self, spec: SessionSpec) -> list[ArchivedCall]:
        """Serve an execution; idempotent. Returns what the archive knew of it, already remembered."""
        if spec.execution in self._live:
            return []
        session = Session(spec, self._limits)
        archived = self._recall(session)
        self._live[spec.execution] = session
        return archived

    def _recall(self, session: Session) -> list[ArchivedCall]:
        archived = list(self._archive.load(session.spec.execution))
        for call in archived:
            session.recall(call)
        return archived

    def authenticate(self, authorization: str) -> Session:
        """The session that `authorization` (a Bearer header) opens.

        Raises:
            CallRefused: 401 for a wrong key, 409 for the key of an execution that has ended.
        """
        scheme, _, secret = authorization.partition(" ")
        execution = secret.removeprefix(SECRET_PREFIX).rpartition(".")[0]
        expected = self.secret(execution)
        if scheme.lower() != "bearer" or not hmac.compare_digest(expected.encode(), secret.strip().encode()):
            raise CallRefused(401, "Authorization: not the key of an execution", "authentication_error",
                              "invalid_api_key")
        session = self._live.get(execution)
        if session is None:
            raise CallRefused(409, f"execution {execution} has ended", "conflict_error", "execution_ended")
        session.check_open()
        return session

    def get(self, execution: str) -> Session | None:
        return self._live.get(execution)

    def undelivered(self, execution: str) -> tuple[str, ...]:
        """Recorded calls whose answer never reached the harness, in order, even of a session that was not opened again."""
        session = self._live.get(execution)
        if session is None:
            session = Session(SessionSpec(execution, "", 0, Sampling()))
            self._recall(session)
        return session.deliveries.undelivered

    def close(self, execution: str) -> None:
        """End a session; calls in flight are refused. What it counted can still be asked."""
        session = self._live.get(execution)
        if session:
            session.close()
        self._ended(execution)

    def forget(self, execution: str) -> None:
        """Drop what the archive keeps of an execution that has terminated."""
        self.close(execution)
        self._live.pop(execution, None)
        self._archive.forget(execution)

    def archived(self) -> list[str]:
        """Executions of which the archive keeps calls."""
        return self._archive.executions()

    def __len__(self) -> int:
        return len(self._live)
