"""What a Harbor verifier may leave, and what it means. The inputs are those of public reports."""

import os
from pathlib import Path

import pytest
from gyre.contracts.errors import EvaluationError
from gyre.reward.graders.base import TaskBroken
from gyre.reward.graders.rewards import read_rewards


def leave(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory


@pytest.mark.parametrize(("text", "reward", "metrics"), [
    ("0.5", 0.5, {}),
    (' {"reward": 1, "cov": 0.3}\n', 1.0, {"cov": 0.3}),
    ('{"score": 0.7}', 0.7, {}),
    ('{"reward": 0, "note": "text", "bad": null, "flag": true}', 0.0, {}),
])
def test_reward_json_may_be_a_number_or_an_object(tmp_path: Path, text: str, reward: float, metrics: dict) -> None:
    score = read_rewards(leave(tmp_path, reward_json=text))
    assert (score.reward, score.metrics) == (reward, metrics)


def test_several_values_need_a_chosen_key_and_are_not_a_zero(tmp_path: Path) -> None:
    leave(tmp_path, reward_json='{"accuracy": 0.9, "format": 1}')
    with pytest.raises(TaskBroken, match="accuracy, format.*reward_key"):
        read_rewards(tmp_path)
    assert read_rewards(tmp_path, "accuracy").reward == 0.9
    with pytest.raises(TaskBroken, match="'speed'.*accuracy, format"):
        read_rewards(tmp_path, "speed")


def test_json_is_read_before_text(tmp_path: Path) -> None:
    assert read_rewards(leave(tmp_path, reward_json="0.25", reward_txt="1")).reward == 0.25


@pytest.mark.parametrize("text", ["1", "0.5\n", "1e-3", "0"])
def test_reward_txt_is_one_number(tmp_path: Path, text: str) -> None:
    assert read_rewards(leave(tmp_path, reward_txt=text)).reward == float(text)


@pytest.mark.parametrize("text", ["", "  \n", "passed", "nan", "inf", "-inf", "1e309", "-1", "-1.0", "1 2", "0x1p"])
def test_a_text_that_is_no_reward_is_never_a_zero(tmp_path: Path, text: str) -> None:
    with pytest.raises(EvaluationError, match="reward.txt"):
        read_rewards(leave(tmp_path, reward_txt=text))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"high"', "NaN", "Infinity", "1e309", "true", "null", "-1", "{}", "[" * 10**5,
                                  '{"reward": NaN}', '{"reward": true}', '{"reward": [1]}', '{"reward": -1}',
                                  '{"reward": 1' + "0" * 400 + "}", '{"reward": null, "other": 1}'])
def test_json_that_is_no_reward_is_never_a_zero(tmp_path: Path, text: str) -> None:
    with pytest.raises(EvaluationError, match="reward.json"):
        read_rewards(leave(tmp_path, reward_json=text, reward_txt="1"))


def test_nothing_left_is_no_reward(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="neither"):
        read_rewards(tmp_path)


def test_only_plain_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    secret = leave(tmp_path, secret_txt="1") / "secret.txt"
    (tmp_path / "link").mkdir()
    (tmp_path / "link/reward.txt").symlink_to(secret)
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo/reward.json")
    (tmp_path / "dir/reward.json").mkdir(parents=True)
    (tmp_path / "big").mkdir()
    (tmp_path / "big/reward.txt").write_bytes(b"1" * (1024 * 1024 + 1))
    for name in ("link", "fifo", "dir", "big"):
        with pytest.raises(EvaluationError, match="reward"):
            read_rewards(tmp_path / name)
