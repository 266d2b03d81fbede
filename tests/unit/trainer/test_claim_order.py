"""Who takes what: longest first, sized by speed and by what is left, so that unequal cells end together."""

import random

import pytest
from claim_cells import Cells, known, optimum, ref
from gyre.trainer.claims import STALL_LEASES, ClaimTable, Verdict
from gyre.trainer.speeds import MIN_MEASURED, CostFit, Speeds
from hypothesis import given, settings
from hypothesis import strategies as st

COSTS = st.lists(st.floats(0.5, 10.0), min_size=1, max_size=7)
MANY = st.lists(st.floats(0.1, 10.0), min_size=10, max_size=60)


def table(costs: list[float], speeds: Speeds, sealed: bool = True, lease_s: float = 10.0) -> ClaimTable:
    made = ClaimTable(0, 0, "c0", lease_s, speeds)
    made.add(tuple(ref(f"m{i}", cost) for i, cost in enumerate(costs)))
    if sealed:
        made.seal()
    return made


def names(claims: ClaimTable, worker: str, now: float, most: int = 1) -> list[str]:
    return [got.micro_step for got in claims.claim_chunk(worker, now, most)[1]]


# ---------------------------------------------------------------- bounds


@settings(max_examples=60, deadline=None)
@given(costs=COSTS, num_cells=st.integers(1, 3))
def test_equal_cells_stay_within_longest_firsts_bound_of_the_optimum(costs: list[float], num_cells: int) -> None:
    worked = Cells(dict.fromkeys(range(num_cells), 1.0)).work_off(costs)
    assert worked.makespan <= (4 / 3 - 1 / (3 * num_cells)) * optimum(costs, [1.0] * num_cells) + 1e-9


@settings(max_examples=60, deadline=None)
@given(costs=COSTS, late=st.floats(0.0, 10.0))
def test_a_cell_that_comes_later_stays_within_the_bound_for_staggered_starts(costs: list[float], late: float) -> None:
    worked = Cells({0: 1.0, 1: 1.0}, joins={1: late}).work_off(costs)
    assert worked.makespan <= (3 / 2 - 1 / 4) * optimum(costs, [1.0, 1.0], [0.0, late]) + 1e-9


@settings(max_examples=100, deadline=None)
@given(costs=MANY, speeds=st.lists(st.floats(0.25, 4.0), min_size=1, max_size=5), most=st.sampled_from([1, 4]))
def test_unequal_cells_end_within_one_micro_step_of_a_perfect_division(
    costs: list[float], speeds: list[float], most: int
) -> None:
    cells = Cells(dict(enumerate(speeds)), most=most)
    worked = cells.work_off(costs)
    perfect = sum(costs) / sum(speeds)
    one_more = max((len(speeds) - 1) * max(costs) / sum(speeds), min(costs) / min(speeds))
    assert worked.makespan <= perfect + one_more + 3 * cells.poll_s
    assert set(worked.by) == {f"m{i:03d}" for i in range(len(costs))}


def test_small_micro_steps_kept_for_the_end_close_the_gap() -> None:
    rng = random.Random(0)
    costs = [rng.uniform(0.2, 6.0) for _ in range(80)]
    worked = Cells({0: 2.0, 1: 1.0, 2: 0.5}).work_off(costs)
    assert worked.spread <= 1.0, "the largest alone takes the slowest cell twelve"


def test_a_faster_cell_claims_more_and_one_that_comes_earlier_too() -> None:
    even = [1.0] * 60
    by = list(Cells({0: 1.0, 1: 2.0}).work_off(even).by.values())
    assert 37 <= by.count(1) <= 43
    by = list(Cells({0: 1.0, 1: 1.0}, joins={1: 20.0}).work_off(even).by.values())
    assert 38 <= by.count(0) <= 42


def test_speeds_that_nobody_measured_are_found_out_on_the_way() -> None:
    worked = Cells({0: 30.0, 1: 10.0, 2: 10.0}, heard=Speeds(), most=4).work_off([1.0] * 500)
    assert worked.makespan <= 500 / 50.0 + 0.2


@settings(max_examples=100, deadline=None)
@given(data=st.data(), costs=MANY)
def test_wrong_measurements_starve_nobody(data: st.DataObject, costs: list[float]) -> None:
    """Whatever is believed of the cells, the step ends: an overdue worker is not waited for."""
    real = {cell: data.draw(st.floats(0.2, 5.0)) for cell in range(3)}
    believed = known({cell: data.draw(st.floats(0.01, 100.0)) for cell in range(3)})
    Cells(real, heard=believed, most=data.draw(st.integers(1, 5)), poll_s=0.5).work_off(costs)


# ---------------------------------------------------------------- the guard and the chunks


def test_near_the_end_a_slow_worker_leaves_a_long_micro_step_to_a_fast_one() -> None:
    claims = table([10.0, 9.0, 0.5], known({0: 1.0, 1: 10.0}))
    claims.join("s1", 1, 0.0)
    assert names(claims, "s1", 0.0) == ["m0"]
    assert names(claims, "c0", 0.0) == ["m2"], "the fast one will be done with m1 in two seconds"
    assert names(claims, "s1", 1.0) == ["m1"]


def test_a_worker_that_is_overdue_is_not_waited_for() -> None:
    claims = table([10.0], known({0: 1.0, 1: 10.0}), lease_s=1e9)
    claims.join("s1", 1, 0.0)
    claims.claim("s1", 0.0)
    claims.add((ref("next", 10.0),))
    assert names(claims, "c0", 0.5) == [], "the fast one is free in half a second"
    assert names(claims, "c0", 12.0) == ["next"], "it should have been free long ago"


def test_a_chunk_is_half_of_a_workers_share_and_shrinks_to_one() -> None:
    claims = table([1.0] * 16, known({0: 10.0, 1: 10.0}))
    claims.join("s1", 1, 0.0)
    assert [len(names(claims, worker, 0.0, 100)) for worker in ("s1", "c0") * 3] == [4, 3, 2, 1, 1, 1]
    claims = table([1.0] * 16, known({0: 10.0, 1: 30.0}))
    claims.join("s1", 1, 0.0)
    assert len(names(claims, "s1", 0.0, 100)) == 6
    assert len(names(claims, "c0", 0.0, 100)) == 1


def test_a_chunk_is_a_seconds_worth_at_most() -> None:
    claims = table([1.0] * 1000, known({0: 7.0}))
    assert len(names(claims, "c0", 0.0, 100)) == 7
    assert len(names(claims, "c0", 0.0, 4)) == 4
    assert len(names(table([1.0] * 1000, known({0: 0.1})), "c0", 0.0, 100)) == 1


def test_a_cell_that_was_never_measured_gets_one_micro_step_first() -> None:
    claims = table([1.0] * 16, Speeds())
    assert len(names(claims, "c0", 0.0, 100)) == 1


def test_a_chunk_is_the_longest_and_what_still_fits_the_share() -> None:
    claims = table([8.0, 7.0, 3.0, 2.0], known({0: 100.0}))
    assert names(claims, "c0", 0.0, 100) == ["m0", "m3"]


# ---------------------------------------------------------------- joining


def test_a_newcomer_that_would_come_too_late_waits_for_the_next_step() -> None:
    speeds = known({0: 1.0, 1: 1.0})
    speeds.join_s = 5.0
    assert not table([2.0, 2.0, 2.0], speeds).join("s1", 1, 0.0)
    assert table([2.0] * 20, speeds).join("s1", 1, 0.0)
    assert table([2.0], speeds, sealed=False).join("s1", 1, 0.0), "more may come while the step is open"
    assert table([2.0], Speeds()).join("s1", 1, 0.0), "nothing is known yet"


def test_what_joining_takes_is_measured_from_admission_to_the_first_claim() -> None:
    speeds = Speeds()
    claims = table([1.0] * 4, speeds)
    claims.join("s1", 1, 2.0)
    claims.claim("s1", 5.0)
    claims.claim("s1", 9.0)
    assert speeds.join_s == 3.0


# ---------------------------------------------------------------- leases


def test_heartbeats_keep_the_lease_of_a_long_micro_step() -> None:
    claims = table([1.0, 1.0], Speeds())
    claims.join("s1", 1, 0.0)
    (name,) = names(claims, "s1", 0.0)
    for now in range(5, 60, 5):
        assert claims.heartbeat("s1", float(now)) and claims.expire(float(now)) == []
    assert claims.complete("s1", name, {}, 60.0)
    assert claims.expire(70.0) == ["s1"] and not claims.heartbeat("s1", 70.0)


def test_a_worker_that_only_ever_beats_is_revoked_in_the_end() -> None:
    claims = table([1.0], Speeds())
    claims.join("s1", 1, 0.0)
    claims.claim("s1", 0.0)
    beats = range(0, 11 * STALL_LEASES, 5)
    assert any(claims.heartbeat("s1", float(now)) and claims.expire(now + 5.0) == ["s1"] for now in beats)
    assert claims.claim("c0", 1000.0)[0] is Verdict.WORK


def test_a_micro_step_that_should_take_long_is_given_the_time() -> None:
    claims = table([1000.0], known({0: 1.0, 1: 1.0}))
    claims.join("s1", 1, 0.0)
    claims.claim("s1", 0.0)
    for now in range(0, 5000, 5):
        claims.heartbeat("s1", float(now))
        assert claims.expire(float(now)) == []


# ---------------------------------------------------------------- what is measured


def test_long_micro_steps_weigh_more_in_a_speed() -> None:
    speeds = Speeds()
    speeds.measured(1, ref("long", 100.0), 10.0)
    speeds.measured(1, ref("short", 1.0), 1.0)
    assert speeds.of(1) == pytest.approx((0.7 * 100 + 1) / (0.7 * 10 + 1))
    speeds.measured(2, ref("m", 4.0), 2.0)
    assert speeds.of(3) == pytest.approx((speeds.of(1) + 2.0) / 2)
    assert Speeds().of(0) == 1.0


def test_the_fit_finds_what_tokens_and_pairs_really_cost() -> None:
    """Declared: 1 per token and 0.001 per pair. In truth a pair takes ten times as long."""
    rng, fit = random.Random(1), CostFit()
    samples = [(t, t * rng.randint(10, 2000)) for t in (rng.randint(100, 4000) for _ in range(40))]
    for tokens, pairs in samples:
        fit.measured(tokens, tokens + 0.001 * pairs, 1e-5 * (tokens + 0.01 * pairs))
    per_token, per_cost = fit.weights()
    work = [per_token * t + per_cost * (t + 0.001 * p) for t, p in samples]
    true = [t + 0.01 * p for t, p in samples]
    assert per_token == 0.0 or sorted(work) == [w for _, w in sorted(zip(true, work, strict=True))]


def test_the_fit_is_not_believed_before_it_can_be() -> None:
    fit = CostFit()
    for index in range(MIN_MEASURED - 1):
        fit.measured(10.0 + index, 5.0, 1.0)
    assert fit.weights() == (0.0, 1.0)
    same = CostFit()
    for _ in range(2 * MIN_MEASURED):
        same.measured(10.0, 20.0, 1.0)
    assert same.weights() == (0.0, 1.0), "tokens and cost that only ever go together tell nothing"


def test_the_fit_reorders_claims_and_changes_nothing_else() -> None:
    speeds, rng = Speeds(), random.Random(2)
    for _ in range(30):  # in truth only tokens cost anything
        tokens, cost = rng.randint(1, 100), rng.uniform(1, 100)
        speeds.measured(rng.randint(0, 1), ref("m", cost, tokens), tokens / 50)
    claims = ClaimTable(0, 0, "c0", 10.0, speeds)
    claims.add((ref("costly", 90.0, 10), ref("wordy", 10.0, 90)))
    assert names(claims, "c0", 0.0) == ["wordy"]
    assert claims.unclaimed_cost == 90.0, "what is declared is what is reported"


def test_one_cell_alone_keeps_to_the_declared_order() -> None:
    speeds, rng = Speeds(), random.Random(2)
    for _ in range(30):
        tokens, cost = rng.randint(1, 100), rng.uniform(1, 100)
        speeds.measured(0, ref("m", cost, tokens), tokens / 50)
    claims = ClaimTable(0, 0, "c0", 10.0, speeds)
    claims.add((ref("costly", 90.0, 10), ref("wordy", 10.0, 90)))
    assert names(claims, "c0", 0.0) == ["costly"]
