"""A ledger read back from a real NATS server is that of the facts that were published."""

import pytest
from gyre.cli.ledger import RunLedger, load_ledger
from gyre.contracts import events as e
from gyre.contracts.codec import encode
from gyre.contracts.subjects import message_id, subject_of
from gyre.runtime.bus import Bus

RUN = "ledger-run"
SPEC = e.ExecutionSpec("g00000-000-x00", 1, 60.0, 120.0)
FACTS: tuple[e.Fact, ...] = (
    e.RunOpened("d" * 32, 0, 1), e.BurstOpened(0, 0, 1),
    e.GroupDispatched("g00000-000", 0, "q", "train/q", "train", 0, (SPEC,)),
    e.ExecutionStarted(SPEC.execution, "g00000-000", "train", 0),
    e.ExecutionTerminated(SPEC.execution, "g00000-000", "q", "train", "finished", 0, 1.0),
    e.ExecutionScored(SPEC.execution, "g00000-000", 0.5, 1, 2, "evaluator-0"),
    e.GroupCompleted("g00000-000", 0, "q", "train", 0, (
        e.Outcome(SPEC.execution, "scored", "finished", 0.5, 0.0, 0, 0, 0),), 1, 0.5, 0.0, ()),
    e.StepSealed(0, ("g00000-000",), (), 1),
    e.StepFinished(0, 1, 0, False, 1, 0, 0, 0.0, 0.0, 1e-3, executions=(SPEC.execution,)),
    e.WeightsPublished(1, "c" * 32, 0, "checkpoints/1"), e.RunClosed("completed", 1),
)


@pytest.fixture
async def bus(nats_server):
    bus = await Bus.connect(nats_server.url, "test")
    await bus.bootstrap()
    yield bus
    await bus.close()


async def publish(bus: Bus, fact: e.Fact, run: str, number: int) -> None:
    body = encode(fact, id=str(number), run=run, source="test", time_ns=1_700_000_000_000_000_000 + number)
    await bus.publish(subject_of(fact, run), body, f"{message_id(fact, run)}")


async def test_what_was_published_is_read_back(bus):
    expected = RunLedger(RUN)
    for number, fact in enumerate(FACTS):
        await publish(bus, fact, RUN, number)
        await publish(bus, fact, "another-run", number)
        expected.fold(fact, (1_700_000_000_000_000_000 + number) / 1e9)
    request = e.EvaluationRequested(SPEC.execution, "g00000-000", "q", "train/q", "train", "finished",
                                    e.BlobRef("w", "0" * 32, 1))
    await publish(bus, request, RUN, 99)

    ledger = await load_ledger(bus, RUN)

    assert ledger.facts == expected.facts
    assert ledger.is_complete
    assert all(check.ok for check in ledger.checks())
    assert await bus.last_sequence("GYRE_EVAL") == 1  # the evaluators' work was left alone
