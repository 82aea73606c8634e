"""Reward models: what they say beside plain transformers, that it is the same to the bit, and what ends a worker."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from environment_harness import WAIT_S, config, results, said

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.rollout.environments import Score
from tandem.rollout.environments.making import make_reward_model
from tandem.rollout.environments.outcomes import UnscoredResponse
from tandem.rollout.environments.reward_model import RewardModel
from tandem.rollout.environments.scorer import EnvironmentScorer
from tests.harness.reward_models import plain_reward, write_reward_model
from tests.harness.runs.running import titled

ASKED = "3 + 4"
SUM = Problem(problem_id="p1", question="unused", answer="7", metadata={}, prompt=({"role": "user", "content": ASKED},))
RESPONSES = [" = 7", "7", "", "= 12 - 5", "1 + 2 + 3 + 4 = 10", "9" * 40, " = 8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("classifier") / "rm")


def described(folder: Path, **settings: Any) -> Config:
    return config("reward_model", {"model_name": str(folder), "precision": "float32", "batch_size": 4, **settings})


def made(folder: Path, **settings: Any) -> RewardModel:
    model = make_reward_model(described(folder, **settings))
    assert isinstance(model, RewardModel)
    return model


def rewards(model: RewardModel, responses: list[str]) -> list[float]:
    """Score conversations, those of one shape together, in the order in which they are."""
    rows = [model.encode(SUM, said(response)) for response in responses]
    found: dict[int, float] = {}
    for shape in {model.shape_of(len(row)) for row in rows}:
        alike = [index for index, row in enumerate(rows) if model.shape_of(len(row)) == shape]
        for start in range(0, len(alike), model.batch_size):
            batch = alike[start : start + model.batch_size]
            scores = model.score_together([rows[index] for index in batch])
            found |= {index: score.reward for index, score in zip(batch, scores, strict=True)}
    return [found[index] for index in range(len(responses))]


# --- what it says ----------------------------------------------------------------------------------------------------


def test_scores_are_those_of_plain_transformers(folder: Path) -> None:
    expected = [plain_reward(folder, ("user", ASKED), ("assistant", response)) for response in RESPONSES]
    assert rewards(made(folder), RESPONSES) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1, "they say something"


def test_a_model_without_a_padding_token_reads_the_last_token(tmp_path: Path) -> None:
    """And one whose padding token is the end of a turn reads what is before it, as transformers does."""
    for name, pad_id in (("none", None), ("end", 2)):
        folder = write_reward_model(tmp_path / name, kind="llama", pad_token_id=pad_id)
        expected = [plain_reward(folder, ("user", ASKED), ("assistant", response)) for response in RESPONSES]
        assert rewards(made(folder), RESPONSES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_score_is_the_same_to_the_bit_whatever_is_scored_beside_it(folder: Path, precision: str) -> None:
    """Whoever is beside it, in whichever row it lies, and where it is alone."""
    model, draw = made(folder, batch_size=5, precision=precision), random.Random(0)
    responses = ["".join(draw.choices("0123456789+-= ", k=draw.randrange(1, 50))) for _ in range(40)]
    alone = [rewards(model, [response])[0] for response in responses]
    for _ in range(4):
        command = draw.sample(range(len(responses)), len(responses))
        assert rewards(model, [responses[index] for index in command]) == [alone[index] for index in command]


def test_lengths_are_padded_a_little_and_always(folder: Path) -> None:
    model = made(folder)
    assert [model.shape_of(num) for num in (1, 15, 16, 31, 32, 47, 63)] == [16, 16, 32, 32, 48, 48, 64]
    model._positions = None
    for num_tokens in range(1, 5000):
        assert num_tokens < model.shape_of(num_tokens) <= max(num_tokens + 16, 1.26 * num_tokens + 1)


def test_a_conversation_that_is_too_long_is_not_scored(folder: Path) -> None:
    with pytest.raises(DataError, match=re.escape("has 67 tokens, and the reward model scores no more than 63")):
        made(folder).encode(SUM, said("9" * 60))
    with pytest.raises(DataError, match=re.escape("no more than 20 (env.reward_model.max_model_len)")):
        made(folder, max_model_len=20).encode(SUM, said("9" * 14))


# --- in its process --------------------------------------------------------------------------------------------------


def worker(others: set[psutil.Process]) -> psutil.Process:
    """Wait for the process that has the model, among the guardians and forks that came to `others`.

    One that is replaced may be there for a moment beside the other.
    """
    deadline = time.monotonic() + WAIT_S
    while len(found := titled(below() - others, "rollout: scores with ")) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found[0]


def below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_it_has_a_process_of_its_own_which_is_replaced(folder: Path) -> None:
    """Killed or stuck: what it had is scored by another, and the scores are the same to the bit."""
    draw, model = random.Random(1), made(folder)
    responses = ["".join(draw.choices("0123456789+-= ", k=draw.randrange(1, 50))) for _ in range(60)]
    expected = [Score(reward, correct=reward >= 0.5) for reward in rewards(model, responses)]
    others = below()
    scorer = EnvironmentScorer(described(folder, timeout_s=5.0, correct_from=0.5))
    with contextlib.closing(scorer):
        scorer.await_ready()
        *found, unknown = results(scorer, *responses, "abc", of=SUM)
        assert found == expected
        assert isinstance(unknown, UnscoredResponse)
        assert unknown.dropped
        assert "does not know the characters 'abc'" in unknown.failure
        killed = worker(others)
        os.kill(killed.pid, signal.SIGSTOP)  # so that it cannot be done before it is killed
        for key, response in enumerate(responses):
            scorer.submit(key, SUM, said(response))
        killed.kill()
        assert collected(scorer, len(responses)) == expected
        stuck = worker(others)
        os.kill(stuck.pid, signal.SIGSTOP)
        assert results(scorer, *responses, of=SUM) == expected
        assert len({killed.pid, stuck.pid, worker(others).pid}) == 3


def test_samples_are_dropped_while_it_cannot_be_loaded_again(tmp_path: Path) -> None:
    """Where nothing else is said of samples that it does not score."""
    folder, others = write_reward_model(tmp_path / "rm"), below()
    expected = [Score(reward, correct=reward >= 0.5) for reward in rewards(made(folder), RESPONSES)]
    scorer = EnvironmentScorer(described(folder, correct_from=0.5))
    with contextlib.closing(scorer):
        scorer.await_ready()
        weights = folder / "model.safetensors"
        weights.rename(folder / "elsewhere")
        worker(others).kill()
        lost = results(scorer, "1", "2", of=SUM)
        assert all(isinstance(each, UnscoredResponse) and each.dropped for each in lost)
        said_of = (
            f"attempts: env.reward_model.model_name: cannot load '{folder}': Error no file named model.safetensors"
        )
        assert all(isinstance(each, UnscoredResponse) and said_of in each.failure for each in lost), lost
        (folder / "elsewhere").rename(weights)
        assert results(scorer, *RESPONSES, of=SUM) == expected


def test_what_takes_too_long_again_and_again_is_not_scored(folder: Path) -> None:
    """It is tried among others, once more, and then by itself."""
    scorer = EnvironmentScorer(described(folder, timeout_s=0.0001))
    with contextlib.closing(scorer):
        scorer.await_ready()
        found = results(scorer, "1", "2", of=SUM)
    late = "took longer than 0.0001 s to score a response to problem 'p1' (env.reward_model.timeout_s)"
    assert [each.failure for each in found if isinstance(each, UnscoredResponse)] == [
        f"environment 'reward_model' {late}"
    ] * 2


def collected(scorer: EnvironmentScorer, count: int) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found |= scorer.poll()
        time.sleep(0.001)
    return [found[key] for key in range(count)]


# --- what is wrong with it -------------------------------------------------------------------------------------------


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    two = write_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"env\.reward_model\.model_name: '.*two' has 2 labels, must have one"):
        made(two)
    with pytest.raises(ModelError, match=r"env\.reward_model\.tokenizer\.name: cannot load a tokenizer from '.*none'"):
        made(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"env\.reward_model\.model_name: '.*none' does not exist"):
        made(tmp_path / "none", tokenizer={"name": str(folder)})
