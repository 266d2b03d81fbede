"""Which answers the harness never saw: told by the connection, or by what later requests show."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gyre.rollout.gateway.dialects.base import Limits
from gyre.rollout.gateway.evidence import Evidence
from gyre.rollout.gateway.messages import ChatRequest, Message, ToolCall
from gyre.rollout.gateway.server import GatewayApp
from rollout_fakes import Bench, ask, make_bench

HI = Message("user", "hi")
LONG = "a summary that is long enough to be known wherever it stands, whatever stands before and behind it"
SHELL = ({"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}},)
X = "g00000-000-x00"


def user(text: str) -> Message:
    return Message("user", text)


def name(number: int) -> str:
    return f"{X}-c{number:04d}"


def undelivered(bench: Bench) -> list[int]:
    return [int(call[-4:]) for call in bench.sessions.undelivered(X)]


class Connection:
    """One request as an ASGI server shows it. `lose` ends the connection."""

    def __init__(self, bench: Bench, body: bytes = b'{"messages": [{"role": "user", "content": "hi"}]}') -> None:
        self.app = GatewayApp(bench.sessions, bench.calls, Limits())
        headers = [(b"authorization", f"Bearer {bench.sessions.secret(X)}".encode())]
        self.scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        self.body: list[bytes] = [body]
        self.sent: list[dict[str, Any]] = []
        self._lost = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.body:
            return {"type": "http.request", "body": self.body.pop()}
        await self._lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def lose(self) -> None:
        self._lost.set()

    async def run(self) -> int:
        """The status of the answer."""
        await self.app(self.scope, self.receive, self.send)
        return self.sent[0]["status"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_written_is_delivered(tmp_path: Path, stream: bool) -> None:
    bench = make_bench(tmp_path, "one")
    bench.open()
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}' % (b"true" if stream else b"false")
    assert await Connection(bench, body).run() == 200
    assert undelivered(bench) == []


async def lost(bench: Bench) -> None:
    """A request whose connection breaks while its answer is being sampled."""
    bench.engine.gate.clear()
    connection = Connection(bench)
    task = asyncio.create_task(connection.run())
    while not bench.engine.attempts:
        await asyncio.sleep(0)
    connection.lose()
    await asyncio.sleep(0)
    bench.engine.gate.set()
    await task


async def test_an_answer_whose_connection_was_lost_is_not_delivered_until_a_retry_gets_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    bench.open()
    await lost(bench)
    assert undelivered(bench) == [0]
    again = Connection(bench)
    assert await again.run() == 200
    assert b"one" in again.sent[1]["body"]
    assert (len(bench.records), undelivered(bench)) == (1, [])


async def test_of_requests_that_wait_for_one_call_a_single_one_delivers_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one")
    bench.open()
    bench.engine.gate.clear()
    connections = [Connection(bench) for _ in range(3)]
    tasks = [asyncio.create_task(c.run()) for c in connections]
    while bench.calls.num_joined < 2:
        await asyncio.sleep(0)
    connections[0].lose()
    connections[2].lose()
    await asyncio.sleep(0)
    bench.engine.gate.set()
    assert await asyncio.gather(*tasks) == [200] * 3
    assert (len(bench.records), undelivered(bench)) == (1, [])


async def test_a_request_that_goes_on_from_an_answer_has_seen_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    answer = await ask(bench, [HI], deliver=False)
    assert undelivered(bench) == [0]
    await ask(bench, [HI, answer.message, user("on")], deliver=False)
    assert undelivered(bench) == [1]


async def test_a_prompt_that_holds_a_whole_answer_has_seen_it_whatever_its_messages(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    await ask(bench, [HI], deliver=False)
    whole = bench.tokenizer.decode(bench.records[0].record.output_ids.tolist(), skip_special_tokens=True)
    await ask(bench, [HI, Message("assistant", whole, name="me"), user("on")], deliver=False)
    assert undelivered(bench) == [1]


async def test_answers_that_are_quoted_or_replayed_were_seen(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, LONG, "replayed", "lost", "x")
    for text in "abc":
        await ask(bench, [user(text)], deliver=False)
    assert undelivered(bench) == [0, 1, 2]
    await ask(bench, [user(f"So far: {LONG}"), Message("assistant", "replayed"), user("on")], deliver=False)
    assert undelivered(bench) == [2, 3]


async def test_asking_once_more_shows_nothing_of_the_answer_before(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    await ask(bench, [HI], deliver=False)
    await ask(bench, [HI], deliver=False, max_tokens=100)
    assert (len(bench.records), undelivered(bench)) == (2, [0, 1])


async def test_deliveries_outlive_the_gateway_and_what_is_unknown_counts_as_undelivered(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two", "three", "four")
    await ask(bench, [user("a")])
    await ask(bench, [user("b")], deliver=False)
    third = await ask(bench, [user("c")])
    assert [c.delivered for c in bench.records] == [(), (name(0),), ()]
    bench.archive.close()

    again = make_bench(tmp_path, "another", "last")
    again.open()
    assert undelivered(again) == [1, 2], "nothing in the archive tells that the third arrived"
    assert (await ask(again, [user("b")])).message.content == "two", "the retry of a lost answer gets it"
    assert (await ask(again, [user("a")])).message.content == "another", "a delivered one is sampled anew"
    assert undelivered(again) == [2]
    await ask(again, [user("c"), third.message, user("on")])
    assert undelivered(again) == []
    assert [c.delivered for c in again.records] == [(name(1),), (name(3), name(2))]
    again.archive.close()
    assert undelivered(make_bench(tmp_path)) == [4], "even if nobody opens the session again"


async def test_calls_that_show_what_arrived_need_no_archived_deliveries(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", LONG, "three", "four")
    first = await ask(bench, [HI], deliver=False)
    await ask(bench, [user("summarise")], deliver=False)
    bench.open().deliveries.saved()
    await ask(bench, [HI, first.message, user("on")], deliver=False)
    bench.open().deliveries.saved()
    await ask(bench, [user(f"So far: {LONG}")], deliver=False)
    bench.archive.close()
    assert undelivered(make_bench(tmp_path)) == [2, 3]


async def test_a_tool_call_that_was_answered_before_a_restart_is_answered_after_it(tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "sh", "arguments": {"task": "Find it."}}\n</tool_call>'
    bench = make_bench(tmp_path, text, "two", "three")
    first = await ask(bench, [HI], SHELL)
    [call] = first.message.tool_calls
    await ask(bench, [HI, first.message, Message("tool", "out", tool_call_id=call.id)], SHELL)
    assert bench.records[1].answered == (call.id,)
    bench.archive.close()
    again = make_bench(tmp_path, "x")
    await ask(again, [user("Find it.")])
    assert again.records[0].record.evidence.task_of is None
    assert call == ToolCall(call.id, "sh", '{"task": "Find it."}')


async def test_a_call_that_cannot_be_archived_leaves_its_news_for_the_next(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    await ask(bench, [user("a")])
    bench.archive._db.execute("CREATE TRIGGER full BEFORE INSERT ON call BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    _, pending = bench.calls.start(bench.open(), ChatRequest((user("b"),)), Evidence())
    with pytest.raises(Exception, match="disk full"):
        await pending.result
    bench.archive._db.execute("DROP TRIGGER full")
    await ask(bench, [user("b")])
    assert bench.records[-1].delivered == (name(0),)
    assert undelivered(bench) == []


async def test_a_call_that_was_committed_while_its_execution_was_ended_is_undelivered(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one")
    bench.commits.clear()
    _, pending = bench.calls.start(bench.open(), ChatRequest((HI,)), Evidence())
    await bench.commit_asked.wait()
    bench.sessions.close(X)
    bench.commits.set()
    with pytest.raises(Exception, match="has ended"):
        await pending.result
    assert undelivered(bench) == [0]
