"""Claims: leases inside a step attempt, all of a worker or nothing of it."""

from gyre.contracts.events import BlobRef, MicroStepRef
from gyre.trainer.claims import ClaimTable, Verdict
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


def ref(name: str, cost: float) -> MicroStepRef:
    return MicroStepRef(name, "d", cost, 1, 1, 1, BlobRef(name, "d", 1))


def table(*costs: float, sealed: bool = True) -> ClaimTable:
    made = ClaimTable(3, 0, "core", lease_s=10.0)
    made.add(tuple(ref(f"m{i}", cost) for i, cost in enumerate(costs)))
    if sealed:
        made.seal()
    return made


def work(claims: ClaimTable, worker: str, now: float = 0.0) -> str:
    verdict, got = claims.claim(worker, now)
    assert verdict is Verdict.WORK and got is not None
    return got.micro_step


def test_the_longest_goes_first_and_small_ones_are_kept_for_the_end() -> None:
    claims = table(2.0, 9.0, 5.0)
    claims.join("s1", 1, 0.0)
    assert [work(claims, "core"), work(claims, "s1"), work(claims, "core")] == ["m1", "m2", "m0"]
    assert claims.claim("s1", 0.0) == (Verdict.WAIT, None)


def test_micro_steps_that_arrive_while_others_run_are_claimed_by_cost_too() -> None:
    claims = table(1.0, sealed=False)
    assert work(claims, "core") == "m0"
    claims.add((ref("late", 7.0), ref("m0", 1.0)))
    assert work(claims, "core") == "late"
    assert not claims.window_closed


def test_a_worker_that_falls_silent_loses_everything_it_did() -> None:
    claims = table(3.0, 2.0, 1.0)
    claims.join("s1", 1, 0.0)
    first = work(claims, "s1")
    assert claims.complete("s1", first, {"loss": 1.0}, 5.0)
    second = work(claims, "s1", 5.0)
    assert claims.expire(14.9) == []
    assert claims.expire(15.0) == ["s1"]
    assert claims.unclaimed_cost == 6.0
    assert not claims.complete("s1", second, {}, 15.1)
    assert claims.claim("s1", 15.1) == (Verdict.STALE, None)
    assert claims.totals() == {}


def test_a_revoked_worker_takes_part_again_only_under_a_new_name() -> None:
    claims = table(3.0)
    claims.join("s1", 1, 0.0)
    claims.revoke("s1")
    assert claims.join("s1b", 1, 1.0)
    assert work(claims, "s1b", 1.0) == "m0"


def test_the_join_window_closes_when_everything_is_done_and_opens_if_a_worker_is_lost() -> None:
    claims = table(1.0)
    claims.join("s1", 1, 0.0)
    claims.complete("s1", work(claims, "s1"), {}, 0.0)
    assert claims.window_closed and not claims.join("s2", 2, 0.0)
    assert claims.claim("s1", 0.0) == (Verdict.REDUCE, None)
    claims.revoke("s1")
    assert not claims.window_closed and claims.join("s2", 2, 0.0)


def test_an_offer_must_hold_exactly_what_was_completed() -> None:
    claims = table(1.0, 1.0)
    claims.join("s1", 1, 0.0)
    done = work(claims, "s1")
    claims.complete("s1", done, {}, 0.0)
    assert not claims.offer("s1", frozenset({done}), "t", 0.0), "another micro-step is not computed yet"
    claims.complete("core", work(claims, "core"), {}, 0.0)
    assert not claims.offer("s1", frozenset({done, "m9"}), "t", 0.0)
    assert not claims.offer("s1", frozenset(), "t", 0.0)
    assert not claims.reducible
    assert claims.offer("s1", frozenset({done}), "t", 0.0)
    assert claims.reducible and not claims.complete_sum
    claims.settle("s1")
    assert claims.complete_sum
    assert claims.claim("s1", 0.0) == (Verdict.STALE, None)


def test_offers_are_read_in_cell_order() -> None:
    claims = table(3.0, 2.0, 1.0)
    for worker, cell in (("z", 1), ("a", 2)):
        claims.join(worker, cell, 0.0)
    taken = {w: work(claims, w) for w in ("a", "core", "z")}
    for worker, name in taken.items():
        claims.complete(worker, name, {}, 0.0)
    for worker in ("a", "z"):
        claims.offer(worker, frozenset({taken[worker]}), "t", 0.0)
    assert [o.worker for o in claims.offers] == ["z", "a"]


def test_a_worker_without_work_offers_nothing_and_holds_nobody_up() -> None:
    claims = table(1.0)
    claims.join("idle", 1, 0.0)
    claims.complete("core", work(claims, "core"), {}, 0.0)
    assert claims.claim("idle", 0.0) == (Verdict.WAIT, None)
    assert claims.reducible and claims.complete_sum


def test_a_sealed_step_without_micro_steps_is_complete_at_once() -> None:
    assert table().complete_sum
    assert not table(sealed=False).reducible


def test_totals_and_counts_cover_each_micro_step_once() -> None:
    claims = table(2.0, 1.0)
    claims.join("s1", 1, 0.0)
    claims.complete("s1", work(claims, "s1"), {"loss": 1.5}, 0.0)
    claims.complete("core", work(claims, "core"), {"loss": 2.0}, 0.0)
    assert claims.totals() == {"loss": 3.5}
    assert claims.micro_steps_by_cell() == {0: 1, 1: 1}


class AnyOrder(RuleBasedStateMachine):
    """Joins, claims, completions, losses and offers in any order: each micro-step is in one place, and ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = table(sealed=False)
        self.now = 0.0
        self.workers = ["core"]
        self.holding: dict[str, set[str]] = {"core": set()}
        self.added = 0
        self.summed: list[str] = []

    @rule(cost=st.floats(0.1, 9.0))
    def arrive(self, cost: float) -> None:
        if not self.claims.sealed:
            self.claims.add((ref(f"m{self.added}", cost),))
            self.added += 1

    @rule()
    def seal(self) -> None:
        self.claims.seal()

    @rule()
    def join(self) -> None:
        name = f"s{len(self.workers)}"
        if self.claims.join(name, len(self.workers), self.now):
            self.workers.append(name)
            self.holding[name] = set()

    @rule(index=st.integers(0, 9))
    def work(self, index: int) -> None:
        worker = self.workers[index % len(self.workers)]
        verdict, got = self.claims.claim(worker, self.now)
        if verdict is Verdict.WORK and got is not None:
            assert self.claims.complete(worker, got.micro_step, {"n": 1.0}, self.now)
            self.holding[worker].add(got.micro_step)

    @rule(index=st.integers(0, 9))
    def claim_and_keep(self, index: int) -> None:
        self.claims.claim(self.workers[index % len(self.workers)], self.now)

    @rule(index=st.integers(0, 9), most=st.integers(1, 5), seconds=st.floats(0.0, 3.0))
    def work_on_a_chunk(self, index: int, most: int, seconds: float) -> None:
        """Speeds are measured here, so guards and chunk sizes are those of a real step; the last one may be late."""
        worker = self.workers[index % len(self.workers)]
        for got in self.claims.claim_chunk(worker, self.now, most)[1]:
            self.now += seconds
            if self.claims.complete(worker, got.micro_step, {"n": 1.0}, self.now):
                self.holding[worker].add(got.micro_step)

    @rule(index=st.integers(0, 9))
    def beat(self, index: int) -> None:
        self.claims.heartbeat(self.workers[index % len(self.workers)], self.now)

    @rule(index=st.integers(0, 9))
    def lose(self, index: int) -> None:
        worker = self.workers[index % len(self.workers)]
        if worker != "core":
            self.claims.revoke(worker)
            self.holding[worker] = set()

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.claims.expire(self.now):
            self.holding[worker] = set()

    @rule(index=st.integers(0, 9))
    def offer(self, index: int) -> None:
        worker = self.workers[index % len(self.workers)]
        if worker != "core" and self.holding[worker]:
            self.claims.offer(worker, frozenset(self.holding[worker]), "t", self.now)

    @rule()
    def reduce(self) -> None:
        if self.claims.reducible:
            for offer in self.claims.offers:
                self.summed += sorted(self.holding[offer.worker])
                self.claims.settle(offer.worker)
            if self.claims.complete_sum:
                everything = sorted([*self.summed, *self.holding["core"]])
                assert everything == sorted(self.claims.places())
                assert self.claims.totals().get("n", 0.0) == self.claims.num_micro_steps

    def teardown(self) -> None:
        """Whoever is lost, the core alone can end the step from anywhere: nothing starves, nothing is forgotten."""
        self.claims.seal()
        for worker in self.workers[1:]:
            self.claims.revoke(worker)
        for name in [m for m, where in self.claims.places().items() if where == ["leased:core"]]:
            assert self.claims.complete("core", name, {"n": 1.0}, self.now)
            self.holding["core"].add(name)
        while (claimed := self.claims.claim("core", self.now)[1]) is not None:
            assert self.claims.complete("core", claimed.micro_step, {"n": 1.0}, self.now)
            self.holding["core"].add(claimed.micro_step)
        assert self.claims.complete_sum
        assert sorted([*self.summed, *self.holding["core"]]) == sorted(self.claims.places())

    @invariant()
    def each_micro_step_is_in_one_place(self) -> None:
        assert all(len(where) == 1 for where in self.claims.places().values())


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order = AnyOrder.TestCase
