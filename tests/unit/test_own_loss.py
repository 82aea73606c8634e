"""Losses of the user's: tried out before anything is loaded, held to the protocol, and named when they break it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.common.errors import ConfigError, TrainingError
from tandem.config import Config, build_config, make_plain, resume_differences
from tandem.trainer.losses import Counts, make_loss
from tandem.trainer.losses.custom import blamed, try_out
from tandem.trainer.losses.policy_gradient import PolicyGradientLoss
from tandem.trainer.scores import TokenScores
from tests.unit.loss_harness import COUNTS, CPU, CURRENT_BT, ENTROPY_BT, MASK_BT, micro_batch

_NUMBERS = itertools.count()

LOSS = """
from tandem.trainer.losses import Report, aggregate

class Own:
    def __init__(self, settings, counts, device, scale=1.0):
        self.settings, self.counts, self.scale = settings, counts, scale
        self.report = Report(("own",), counts.tokens, device)

    def __call__(self, batch, scores):
        self.report.add(batch.loss_mask_BT, scores.logprobs)
        return {value}
"""
SUM = "-scores.logprobs.sum() * self.scale"
SCORES_BT = TokenScores(CURRENT_BT, ENTROPY_BT, MASK_BT.double())


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what writes a module that can be imported, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        name = f"own_loss_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def config_of(path: str | None, algorithm: str = "grpo", **kwargs: Any) -> Config:
    return build_config(
        {
            "algorithm": algorithm,
            "loss_fn": {"class": path, "kwargs": kwargs},
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "0"},
        }
    )


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_it_takes_the_place_of_the_algorithms_own(beside: Any, algorithm: str) -> None:
    config = config_of(f"{beside(LOSS.format(value=SUM))}.Own", algorithm, scale=3.0)
    try_out(config)
    loss = make_loss(config, COUNTS, CPU)
    batch = micro_batch()
    value = loss(batch, SCORES_BT)
    assert float(value) == pytest.approx(float(-3.0 * CURRENT_BT.sum()))
    assert loss.report.names == ("own",)
    assert float(loss.report.sums[0]) == pytest.approx(float(CURRENT_BT[MASK_BT].sum()))


def test_of_a_reward_model_it_is_given_the_scores(beside: Any) -> None:
    text = LOSS.format(value="scores.values.sum() * self.scale").replace("scores.logprobs)", "scores.values)")
    try_out(config_of(f"{beside(text)}.Own", "rm"))
    with pytest.raises(ConfigError, match="'TokenValues' object has no attribute 'logprobs'"):
        try_out(config_of(f"{beside(LOSS.format(value=SUM))}.Own", "rm"))


def test_without_one_the_algorithms_own_is_made() -> None:
    assert isinstance(make_loss(config_of(None), COUNTS, CPU), PolicyGradientLoss)
    try_out(config_of(None))


def test_a_loss_need_not_report(beside: Any) -> None:
    name = beside("class Own:\n    def __init__(self, settings, counts, device): pass\n"
                  "    def __call__(self, batch, scores): return scores.logprobs.sum()\n")  # fmt: skip
    loss = make_loss(config_of(f"{name}.Own"), Counts(tokens=4, sequences=2), CPU)
    assert loss.report.names == ()
    assert loss.report.count == 4


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("scores.logprobs", "returned a tensor of shape [2, 4]: a loss is a scalar tensor, computed from the scores"),
        ("1.0", "returned float: "),
        ("None", "returned NoneType: "),
        ("batch.lengths_B.sum()", "returned a number of type int64: "),
        ("batch.advantages_BT.sum()", "returned a number without a gradient: "),
        ("batch.rewards", "AttributeError: 'MicroBatch' object has no attribute 'rewards'"),
        ("scores.logprobs.sum() / 0", "has no finite loss"),
        ("(scores.logprobs * 0).sqrt().sum()", "has no finite gradient"),
    ],
)
def test_what_it_returns_is_looked_at_before_a_model_is_loaded(beside: Any, value: str, said: str) -> None:
    name = beside(LOSS.format(value=value))
    with pytest.raises(ConfigError) as caught:
        try_out(config_of(f"{name}.Own"))
    line = str(caught.value)
    assert line.startswith(f"loss_fn.class {name}.Own")
    assert said in line
    assert line.endswith("(tried out on 2 sequences)")
    assert "\n" not in line


@pytest.mark.parametrize("value", ["scores.logprobs", "batch.nothing", "torch.tensor(1.0)"])
def test_and_in_every_step(beside: Any, value: str) -> None:
    """What it returns may depend on the batch: trying it out is not enough."""
    text = LOSS.format(value=f"{SUM} if len(batch.rows) != 2 else {value}")
    config = config_of(f"{beside('import torch' + text)}.Own", "dpo")
    try_out(config)
    scores_BT = SCORES_BT._replace(logprobs=CURRENT_BT.clone().requires_grad_())
    with pytest.raises(TrainingError, match=f"^loss_fn.class {config.loss_fn.class_path}"):
        make_loss(config, COUNTS, CPU)(micro_batch(), scores_BT)


def test_a_step_that_is_not_taken_names_it(beside: Any) -> None:
    config = config_of(f"{beside(LOSS.format(value=SUM))}.Own")
    with pytest.raises(TrainingError) as caught, blamed(config):
        raise TrainingError("optimizer step 3 was not taken: loss nan, gradient norm nan")
    line = str(caught.value)
    assert line == (
        f"optimizer step 3 was not taken: loss nan, gradient norm nan (loss_fn.class {config.loss_fn.class_path})"
    )


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("", "{}.Missing", "loss_fn.class: cannot import '{}.Missing': module '{}' has no attribute 'Missing'"),
        ("", "no_such_module.Own", "loss_fn.class: cannot import 'no_such_module.Own': No module named"),
        ("1 / 0", "{}.Own", "loss_fn.class: cannot import '{}.Own': ZeroDivisionError: division by zero"),
        ("Own = 3", "{}.Own", "loss_fn.class {}.Own: TypeError: 'int' object is not callable"),
        ("def Own(settings, counts, device, scale): pass", "{}.Own", "loss_fn.class {}.Own: it has no method __call__"),
        (LOSS.format(value=SUM).replace("scale=1.0", ""), "{}.Own", "got an unexpected keyword argument 'scale'"),
    ],
)
def test_a_class_that_cannot_be_made(beside: Any, text: str, path: str, said: str) -> None:
    name = beside(text)
    config = config_of(path.format(name), scale=2.0)
    with pytest.raises(ConfigError) as caught:
        try_out(config)
    assert said.replace("{}", name) in str(caught.value)


def test_its_report_is_a_report(beside: Any) -> None:
    name = beside(LOSS.format(value=SUM).replace('Report(("own",), counts.tokens, device)', "{}") + "\n        ")
    text = (
        f"from {name} import Own as Base\nclass Own(Base):\n    report = property(lambda self: 3, lambda self, v: None)"
    )
    with pytest.raises(ConfigError, match=r"its report is int, not tandem.trainer.losses.Report"):
        try_out(config_of(f"{beside(text)}.Own"))


def test_a_path_that_names_no_class_is_refused_with_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn.class: 'mine' is not a dotted path, such as package.Class"):
        config_of("mine")
    with pytest.raises(ConfigError, match=r"loss_fn.kwargs: .* but loss_fn.class names no class that takes them"):
        config_of(None, scale=1.0)


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_a_resumed_run_may_not_change_it(algorithm: str) -> None:
    one, other, none = (config_of(path, algorithm) for path in ("mine.A", "mine.B", None))
    assert "loss_fn.class" in resume_differences(one, other)
    assert resume_differences(one, none)
    assert resume_differences(one, one) == []
    assert make_plain(one)["loss_fn"]["class"] == "mine.A"
    assert ("loss_fn" in make_plain(none)) == (algorithm == "grpo")


def test_the_gradient_is_the_losses_own(beside: Any) -> None:
    loss = make_loss(config_of(f"{beside(LOSS.format(value=SUM))}.Own"), COUNTS, CPU)
    logprobs_BT = CURRENT_BT.clone().requires_grad_()
    loss(micro_batch(), SCORES_BT._replace(logprobs=logprobs_BT)).backward()
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, -torch.ones_like(CURRENT_BT))


def with_columns(columns: dict[str, Any], algorithm: str = "grpo", path: str | None = "mine.Own") -> Config:
    return build_config(
        {
            "algorithm": algorithm,
            "loss_fn": {"class": path, "columns": columns, "reference_policy_kl_penalty": 0},
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "0"},
        }
    )


def test_its_columns_are_read_beside_those_of_the_algorithm() -> None:
    config = with_columns({"difficulty": {"source": "environment", "fill": 2}, "start": {"source": "reference"}})
    columns = config.columns_of(1)
    assert [column.name for column in columns] == ["generation_logprobs", "advantages", "difficulty", "start"]
    assert columns[2].fill == 2.0
    assert config.needs_reference
    assert config.scored_by(1) == ("reference",)
    assert config.loss_fn.environment_columns == {"difficulty_S": "float32"}
    assert resume_differences(config, with_columns({"start": {"source": "reference"}}))


@pytest.mark.parametrize(
    ("columns", "algorithm", "said"),
    [
        (
            {"version": {"source": "engine"}},
            "grpo",
            "version.source: engine has generation_logprobs, versions, but no version; did you mean 'versions'?",
        ),
        ({"advantages": {"source": "engine"}}, "grpo", "advantages: it is built in: its source is coordinator"),
        ({"rank": {"source": "environment"}}, "grpo", "'rank' cannot be the name of a column"),
        ({"a b": {"source": "environment"}}, "grpo", "'a b' cannot be the name of a column"),
        ({"difficulty": {"source": "environment"}}, "sft", "difficulty.source: environment, but SFT rolls nothing out"),
        ({"versions": {"source": "engine"}}, "dpo", "versions.source: engine, but DPO rolls nothing out"),
        ({"start": {"source": "judge"}}, "grpo", "start.source: 'judge' is not one of coordinator, engine"),
        ({"start": {"source": "teacher"}}, "grpo", "start.source: teacher, but GRPO has no teacher"),
    ],
)
def test_columns_without_a_source_are_refused(columns: dict[str, Any], algorithm: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_columns(columns, algorithm)
    assert f"loss_fn.columns{'' if said[0] == chr(39) else '.'}" in str(caught.value)
    assert said in str(caught.value)


def test_columns_that_nobody_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn.columns: start, but loss_fn.class names no class that reads them"):
        with_columns({"start": {"source": "reference"}}, path=None)


def test_a_column_that_the_algorithm_does_not_have_is_said(beside: Any) -> None:
    name = beside(LOSS.format(value="scores.logprobs.sum() * batch.advantages_BT.sum()"))
    try_out(config_of(f"{name}.Own"))
    with pytest.raises(ConfigError) as caught:
        try_out(config_of(f"{name}.Own", "dpo"))
    said = "LookupError: no column advantages is declared of the loss of this algorithm, but reference_logprobs"
    assert str(caught.value) == f"loss_fn.class {name}.Own: {said} (tried out on 4 sequences)"
