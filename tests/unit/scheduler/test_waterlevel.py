"""What is unfinished, in executions and in tokens."""

from gyre.scheduler.waterlevel import HISTORY, Waterlevel


def level(*executions: str) -> Waterlevel:
    water = Waterlevel()
    water.dispatch(list(executions))
    return water


def test_without_experience_only_what_is_known_counts() -> None:
    water = level("a", "b")
    assert water.kv_tokens() == 0
    water.observe(1, {"a": 300})
    assert water.kv_tokens() == 300


def test_an_execution_is_expected_to_grow_as_nine_in_ten_of_those_that_came_as_far() -> None:
    water = level("a", "b", *map(str, range(10)))
    for number in range(10):
        water.terminate(str(number), 100 * (number + 1))  # 100, 200 .. 1000
    assert water.kv_tokens() == 2 * 1000
    water.observe(1, {"a": 250})
    assert water.kv_tokens() == 1000 + 1000
    water.observe(2, {"a": 5000, "b": 950})
    assert water.kv_tokens() == 5000 + 1000, "nobody came further than a: it counts as it is"


def test_reports_that_are_older_or_name_what_has_ended_change_nothing() -> None:
    water = level("a", "b")
    water.observe(2, {"a": 10, "b": 20})
    water.observe(1, {"a": 99, "b": 99})
    water.terminate("b", 25)
    water.observe(3, {"a": 10, "b": 20})
    assert (water.level, water.contexts, water.kv_tokens()) == (1, {"a": 10}, 25)
    water.terminate("b", 999)
    assert water.kv_tokens() == 25, "a termination that is seen twice is remembered once"


def test_only_the_latest_executions_are_remembered() -> None:
    water = level("a", *map(str, range(2 * HISTORY)))
    for number in range(HISTORY):
        water.terminate(str(number), 1000)
    for number in range(HISTORY, 2 * HISTORY):
        water.terminate(str(number), 10)
    assert water.kv_tokens() == 10
