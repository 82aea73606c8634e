"""Commands are checked, too: one that cannot be is refused in one line, before it is begun."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_harness import CHARACTERS, Rollout

from tandem.common.errors import WireError
from tandem.common.messages import Evaluate, Generate, Message, SamplingParameters, ToRollout, Train
from tandem.common.wire import MessageCodec, encode
from tandem.config import Config, build_config
from tandem.config.schema import NewModel
from tandem.samples.batch import TABLE, SampleBatch, build_given_table
from tandem.samples.model_files import write_new_model
from tandem.trainer.service import TrainerService
from tests.harness.members import MEMBER

VOCABULARY = len(CHARACTERS) + 3


def batch() -> dict[str, Any]:
    whole = SampleBatch(
        lengths_S=np.array([3, 2], np.int32),
        token_ids_T=np.array([1, 4, 5, 1, 6], np.int32),
        loss_mask_T=np.array([False, True, True, False, True]),
        generation_logprobs_T=np.array([0, -1, -1, 0, -0.5], np.float32),
        advantages_S=np.array([0.5, -0.5], np.float32),
        rewards_S=np.zeros(2, dtype=np.float32),
    )
    tokens = {"token_ids_T": whole.token_ids_T, "loss_mask_T": whole.loss_mask_T}
    return {**build_given_table(whole).columns, **tokens}


class Context:
    """Stands where the link to the coordinator would."""

    name, index, run_id, keys = "trainer-0", 0, "run", MEMBER

    def __init__(self, config: Config) -> None:
        self.config = config
        self.phases: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def reply(self, command_id: int, message: Message) -> None:
        raise AssertionError("what was asked cannot be")


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., TrainerService]:
    write_new_model(tmp_path / "model", NewModel(config={"model_type": "qwen3"}, characters=CHARACTERS))

    def make(**grpo: Any) -> TrainerService:
        config = build_config(
            {
                "grpo": grpo,
                "policy": {"model_name": str(tmp_path / "model"), "train_global_batch_size": 512},
                "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
                "env": {"mine": {"class": "a.B"}},
            }
        )
        return TrainerService(Context(config))  # type: ignore[arg-type]

    return make


TRAIN = Train(command_id=5, deadline_s=60.0, step=1, sources={})
NAN = float("nan")
BATCHES: dict[str, tuple[str, Any, str]] = {
    "no loss": ("num_valid_S", np.zeros(2, np.int32), "Train.loss_mask_T: must have as many tokens of each .*"),
    "other loss": ("loss_mask_T", np.zeros(5, np.bool_), "Train.loss_mask_T: must have as many tokens of each .*"),
    "counted": (
        "num_valid_S",
        np.array([4, 1], np.int32),
        "Train.num_valid_S: 4 for sequence 0, must be from 0 .*",
    ),
    "prompt": ("prompt_lengths_S", np.array([1, -1], np.int32), "Train.prompt_lengths_S: -1 for sequence 1, must .*"),
    "rank": ("rank_S", np.array([0, 1], np.int32), "Train.rank_S: 1 for sequence 1, must be from 0 to 0"),
    "source": ("source_S", np.array([0, -1], np.int32), "Train.source_S: 0 for sequence 0, must be from -1 to -1"),
    "key": ("command_S", np.array([0, -1], np.int64), "Train.command_S: -1 for sequence 1, must be at least 0"),
    "advantage": ("advantages_S", np.array([0, NAN], np.float32), "Train.advantages_S: nan for sequence 1, must be .*"),
    "vocabulary": (
        "token_ids_T",
        np.array([1, 4, VOCABULARY, 1, 6], np.int32),
        f"Train.token_ids_T: {VOCABULARY} for token 2, of sequence 0, must be from 0 to {VOCABULARY - 1}",
    ),
    "dtype": ("advantages_S", np.zeros(2), "Train.advantages_S: is float64 .*, must be float32 of one dimension"),
    "length": ("advantages_S", np.zeros(3, np.float32), "Train.advantages_S: 3 numbers, does not fit the 2 sequences"),
    "nothing": ("lengths_S", np.zeros(0, np.int32), "Train.lengths_S: of no sequence, must be at least 1"),
}


@pytest.mark.parametrize(("field", "array", "what"), BATCHES.values(), ids=BATCHES)
def test_a_batch_that_cannot_be(trainer: Callable[..., TrainerService], field: str, array: Any, what: str) -> None:
    with pytest.raises(WireError) as caught:
        trainer().handle(TRAIN, {**batch(), field: array})
    assert re.fullmatch(what, str(caught.value))


def test_some_token_of_a_data_set_counts() -> None:
    table = SampleBatch.parse_frames({name: array for name, array in batch().items() if name.endswith("_S")}, TABLE)
    table.check_table(num_ranks=1)
    none = table.replace(num_valid_S=np.zeros(2, np.int32))
    none.check_table(num_ranks=1, may_mask_all=True)
    with pytest.raises(WireError, match=r"^num_valid_S: no token counts in the loss$"):
        none.check_table(num_ranks=1)


def test_a_batch_without_an_array_or_with_parts_that_are_not_all(trainer: Callable[..., TrainerService]) -> None:
    frames = batch()
    evaluate = Evaluate(command_id=5, deadline_s=60.0, step=1, sources={}, parts={"a": 1})
    with pytest.raises(WireError, match=r"^Evaluate.parts: 1 sequences, must be all 2$"):
        trainer().handle(evaluate, frames)
    del frames["advantages_S"]
    with pytest.raises(WireError, match=r"^Evaluate.advantages_S: is missing$"):
        trainer().handle(evaluate, frames)


def test_all_responses_may_be_cut_off_where_such_do_not_count(trainer: Callable[..., TrainerService]) -> None:
    frames = {**batch(), "loss_mask_T": np.zeros(5, np.bool_), "num_valid_S": np.zeros(2, np.int32)}
    service = trainer(overlong_filtering=True)
    with pytest.raises(AssertionError, match="the coordinator sends BuildTrainer first"):
        service.handle(TRAIN, frames)


def test_prompts_that_the_model_cannot_read(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path, "own_environments.Talks", total=16)
    group = rollout.group(3, [1, 2])
    for prompt_ids, what in (
        ((1, VOCABULARY), rf"prompt_ids: {VOCABULARY}, must be from 0 to {VOCABULARY - 1}$"),
        ((1,) * 16, "prompt_ids: 16 tokens, must be fewer than 16$"),
    ):
        with pytest.raises(WireError, match=r"^Generate.groups\[0\]." + what):
            rollout.start(msgspec.structs.replace(group, prompt_ids=prompt_ids))
    with pytest.raises(WireError, match=r"^Generate.groups: a group is there twice$"):
        rollout.start(group, group)
    assert rollout.run(group), "the engine is as good as before"
    rollout.service.close()


SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4, "stop_token_ids": (2,), "stop_strings": (),
}  # fmt: skip
GENERATE = Generate(
    command_id=7,
    deadline_s=60.0,
    cancel_before=7,
    step=1,
    purpose="train",
    sampling=SamplingParameters(**SAMPLING),  # type: ignore[arg-type]
    groups=(),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", NAN), ("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("max_new_tokens", 0)],
)
def test_sampling_that_cannot_be_is_refused_by_the_name_of_the_command(field: str, value: float) -> None:
    plain = msgspec.msgpack.decode(encode(GENERATE)[0])
    plain["sampling"][field] = value
    with pytest.raises(WireError, match=rf"^Generate.sampling.{field}: Expected `(float|int)` ") as caught:
        MessageCodec[Any](ToRollout).decode([msgspec.msgpack.encode(plain)])
    assert caught.value.command_id == 7
