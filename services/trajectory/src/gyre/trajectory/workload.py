"""Made executions: the records of a long agent session, as a gateway would write them, of any shape and size.

For tests and benchmarks. One main agent works turn by turn; its context is elided and compacted, calls are asked twice,
and sub-agents run beside one another between two of its turns. Every piece of text begins with an id of its own, so
that calls part exactly where the shape says they do, and the counts of the tree follow from the shape (`counts`). Ids
and log-probs are a hash of (seed, piece, position): the same everywhere. Prompts are never written out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.digest import TokenChain
from gyre.contracts.events import CallEvidence, CallRecorded, RoleClass, VersionSpan
from gyre.contracts.ids import call_id

NUM_IDS = 150_000
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of one execution.

    turns            calls of the main agent, without retries and summaries
    context_tokens   opening prompt of every agent: its system prompt, then `task_tokens` of task
    turn_tokens      what comes back after each call (an observation)
    output_tokens    sampled per call
    strip_thinking   of these, tokens at the front that the next prompt leaves out
    elision_window   observations older than the last n stand as notes of `note_tokens`; 0: none is elided
    compactions      the context is summarised and replaced by system prompt and summary, at even distances
    sub_agents       spawned by main turns at even distances; those of one turn take their calls in turn
    sub_agent_turns  calls of each sub-agent
    retries          turns, at even distances, whose call is asked twice; the agent goes on with the second answer

    Raises:
        ValueError: the numbers make no session, or one of too many pieces; the message names the field.
    """

    turns: int
    context_tokens: int = 2048
    turn_tokens: int = 512
    output_tokens: int = 128
    strip_thinking: int = 0
    elision_window: int = 0
    compactions: int = 0
    sub_agents: int = 0
    sub_agent_turns: int = 1
    retries: int = 0
    seed: int = 0
    task_tokens: int = 64
    note_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("turns", "turn_tokens", "output_tokens", "sub_agent_turns", "task_tokens", "note_tokens"):
            _check(getattr(self, name) >= 1, f"{name}: {getattr(self, name)}; at least 1")
        for name in ("elision_window", "sub_agents", "seed"):
            _check(getattr(self, name) >= 0, f"{name}: {getattr(self, name)}; at least 0")
        for name, bound in (("strip_thinking", self.output_tokens), ("compactions", self.turns)):
            _check(0 <= getattr(self, name) < bound, f"{name}: {getattr(self, name)}; at least 0 and below {bound}")
        _check(0 <= self.retries <= self.turns, f"retries: {self.retries}; at least 0 and at most {self.turns}")
        _check(self.task_tokens <= self.context_tokens, f"task_tokens: {self.task_tokens} of {self.context_tokens}")
        num_calls = self.turns + self.retries + self.compactions + self.sub_agents * self.sub_agent_turns
        _check(num_calls * 5 < NUM_IDS, f"turns: {num_calls} calls in all; fewer than {NUM_IDS // 5}")

    @property
    def system_tokens(self) -> int:
        """What all contexts of one agent begin with."""
        return self.context_tokens - self.task_tokens

    @property
    def answer_tokens(self) -> int:
        """What the next prompt keeps of an output."""
        return self.output_tokens - self.strip_thinking

    def compacted_at(self) -> tuple[int, ...]:
        """Turns before which the main context is replaced."""
        return tuple(_spread(self.turns, self.compactions + 1, k) for k in range(1, self.compactions + 1))

    def retried(self) -> frozenset[int]:
        """Turns whose call is asked twice."""
        return frozenset(_spread(self.turns, self.retries, k) for k in range(self.retries))

    def spawned(self, turn: int) -> int:
        """Sub-agents that main turn `turn` spawns."""
        return sum(_spread(self.turns, self.sub_agents, k) == turn for k in range(self.sub_agents))


@dataclass(frozen=True, slots=True)
class Counts:
    """What a tree of the execution must count: calls, tokens written out per call, tokens of the tree, tokens drawn."""

    num_calls: int
    flat: int
    unique: int
    drawn: int


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The records in gateway order, and the role class and the agent that each was made with."""

    records: tuple[CallRecorded, ...]
    roles: tuple[RoleClass, ...]
    agents: tuple[str, ...]


def make(workload: Workload, execution: str = "g00000-000-x00", group: str = "g00000-000") -> Made:
    """The records of one execution of this shape. Time and memory follow the unique tokens, not the prompts."""
    session = _Session(workload, execution, group)
    session.run()
    return Made(tuple(session.records), tuple(session.roles), tuple(session.agents))


def counts(workload: Workload) -> Counts:
    """The counts of `make(workload)`, by arithmetic alone."""
    w = workload
    edges = (0, *w.compacted_at(), w.turns)
    summarised = w.system_tokens + w.answer_tokens
    flat = unique = 0
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        opening = summarised if number else w.context_tokens
        for turn in range(stop - start):
            times = 2 if start + turn in w.retried() else 1
            flat += times * (_prompt(w, opening, turn) + w.output_tokens)
            unique += times * w.output_tokens + (_delta(w, turn) if turn else opening - (w.system_tokens if number else 0))
        if stop < w.turns:  # the summary: the next prompt, and an instruction as long as a task
            flat += _prompt(w, opening, stop - start) + w.task_tokens + w.output_tokens
            unique += _delta(w, stop - start) + w.task_tokens + w.output_tokens
    flat += w.sub_agents * sum(_prompt(w, w.context_tokens, t) + w.output_tokens for t in range(w.sub_agent_turns))
    own = w.task_tokens + sum(_delta(w, t) for t in range(1, w.sub_agent_turns)) + w.sub_agent_turns * w.output_tokens
    unique += w.sub_agents * own + (w.system_tokens if w.sub_agents else 0)
    num_calls = w.turns + w.compactions + w.retries + w.sub_agents * w.sub_agent_turns
    return Counts(num_calls, flat, unique, num_calls * w.output_tokens)


def _prompt(w: Workload, opening: int, turn: int) -> int:
    """Length of the prompt of turn `turn` of a context."""
    elided = max(0, turn - w.elision_window) if w.elision_window else 0
    return opening + turn * (w.answer_tokens + w.turn_tokens) - elided * (w.turn_tokens - w.note_tokens)


def _delta(w: Workload, turn: int) -> int:
    """Tokens of the prompt of turn `turn` >= 1 that no earlier call has there."""
    if w.elision_window and turn > w.elision_window:
        return w.note_tokens + w.elision_window * (w.answer_tokens + w.turn_tokens)
    return w.turn_tokens + (w.answer_tokens if w.strip_thinking else 0)


@dataclass(slots=True)
class _Turn:
    """A past turn whose observation is still whole; `chain` is the digest state before the observation."""

    answer: np.ndarray
    observation: np.ndarray
    chain: TokenChain


@dataclass(slots=True)
class _Agent:
    """One agent's context. The next prompt is what `keep` covers, then `delta`."""

    name: str
    is_sub: bool
    base: str | None = None
    keep: TokenChain = TokenChain()
    delta: Sequence[np.ndarray] = ()
    whole: TokenChain = TokenChain()  # prompt and output of the last call
    evidence: CallEvidence = field(default_factory=CallEvidence)
    recent: deque[_Turn] = field(default_factory=deque)
    left: int = 0  # calls a sub-agent has still to make


@dataclass(slots=True)
class _Session:
    """Writes the records, call by call."""

    w: Workload
    execution: str
    group: str
    records: list[CallRecorded] = field(default_factory=list)
    roles: list[RoleClass] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    num_pieces: int = 0
    systems: dict[bool, tuple[str, TokenChain]] = field(default_factory=dict)  # is_sub -> first call, its system prompt

    def run(self) -> None:
        main = _Agent("main", is_sub=False)
        self._open(main, self._piece(self.w.task_tokens), CallEvidence())
        compacted, retried = set(self.w.compacted_at()), self.w.retried()
        for turn in range(self.w.turns):
            if turn in compacted:
                self._compact(main)
            for _ in range(2 if turn in retried else 1):
                answer = self._call(main, "main")
            self._delegate(main.base or "", self.w.spawned(turn))
            self._observe(main, answer)

    def _delegate(self, spawner: str, num: int) -> None:
        """`num` sub-agents beside one another, to their ends."""
        open_agents = deque(_Agent("", is_sub=True, left=self.w.sub_agent_turns) for _ in range(num))
        while open_agents:
            agent = open_agents.popleft()
            if agent.left == self.w.sub_agent_turns:
                agent.name = f"sub-{len(self.records)}"
                self._open(agent, self._piece(self.w.task_tokens), CallEvidence(task_of=spawner))
            answer = self._call(agent, "sub-agent")
            agent.left -= 1
            if agent.left:
                self._observe(agent, answer)
                open_agents.append(agent)

    def _open(self, agent: _Agent, text: np.ndarray, evidence: CallEvidence) -> None:
        """Begin a context: the system prompt of the agent's kind, then `text`."""
        known = self.systems.get(agent.is_sub)
        agent.recent.clear()
        agent.evidence = evidence
        if known is None:
            system = self._piece(self.w.system_tokens)
            self.systems[agent.is_sub] = (call_id(self.execution, len(self.records)), TokenChain().extend(system))
            agent.base, agent.keep, agent.delta = None, TokenChain(), (system, text)
        else:
            agent.base, agent.keep = known if self.w.system_tokens else (None, TokenChain())
            agent.delta = (text,)

    def _compact(self, main: _Agent) -> None:
        main.delta = (*main.delta, self._piece(self.w.task_tokens))
        summary = self._call(main, "main-summary")
        self._open(main, summary, CallEvidence(quotes=(main.base or "",)))

    def _observe(self, agent: _Agent, answer: np.ndarray) -> None:
        """Append the answer and what came back; elide what is too old now."""
        observation = self._piece(self.w.turn_tokens)
        chain, delta = agent.keep, [observation]
        if self.w.strip_thinking:
            chain, delta = chain.extend(answer), [answer, observation]
        else:
            agent.keep = chain = agent.whole
        agent.recent.append(_Turn(answer, observation, chain))
        if self.w.elision_window and len(agent.recent) > self.w.elision_window:
            agent.keep = agent.recent.popleft().chain
            delta = [self._piece(self.w.note_tokens)]
            chain = agent.keep.extend(delta[0])
            for turn in agent.recent:
                turn.chain = chain.extend(turn.answer)
                chain = turn.chain.extend(turn.observation)
                delta += [turn.answer, turn.observation]
        agent.delta = delta

    def _call(self, agent: _Agent, role: RoleClass) -> np.ndarray:
        """Record the agent's next call; returns what the next prompt keeps of its output."""
        w, name = self.w, call_id(self.execution, len(self.records))
        prompt = agent.keep
        for piece in agent.delta:
            prompt = prompt.extend(piece)
        answer = self._piece(w.answer_tokens)
        output = np.concatenate((self._piece(w.strip_thinking), answer))
        logprobs = -(_mixed(w.seed, self.num_pieces, w.output_tokens) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        agent.whole = prompt.extend(output)
        self.records.append(CallRecorded(
            self.execution, self.group, name, len(self.records), agent.base, agent.keep.length, prompt.length,
            np.concatenate((_NONE, *agent.delta)), output, logprobs, logprobs, (VersionSpan(0, len(output), 0),), "stop",
            agent.whole.hexdigest(), evidence=agent.evidence))
        self.roles.append(role)
        self.agents.append(agent.name)
        agent.base, agent.keep, agent.delta, agent.evidence = name, prompt, (), CallEvidence(continues=True)
        return answer

    def _piece(self, size: int) -> np.ndarray:
        """New text: int32 [size]; its first id occurs at the beginning of no other piece."""
        if not size:
            return _NONE
        ids = (_mixed(self.w.seed, ~self.num_pieces, size) % np.uint64(NUM_IDS)).astype(np.int32)
        ids[0] = self.num_pieces
        self.num_pieces += 1
        return ids


def _mixed(seed: int, piece: int, size: int) -> np.ndarray:
    """uint64 [size]: SplitMix64 of (seed, piece, position)."""
    start = (seed * 0xD1342543DE82EF95 + piece * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
    z = np.uint64(start) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _spread(num: int, parts: int, part: int) -> int:
    """Where part `part` of `parts` begins in `num` turns."""
    return part * num // parts


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)
