"""A custom loss: found by its dotted path, and checked to behave like a loss.

Every mistake is reported in one line that names the loss, at the latest in the first step. Most are found before any
model is loaded, because `try_out` calls it with a micro-batch then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.common.errors import ConfigError, TandemError, TrainingError
from tandem.common.user_code import named
from tandem.config import Config
from tandem.config.schema.columns import GENERATION_LOGPROBS, ColumnDeclaration
from tandem.trainer.losses import Counts, Report
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores, StudentScores, TokenScores, TokenValues

_KEY = "loss_fn.class"


class CustomLoss:
    """The loss that ``loss_fn.class`` names, as a `tandem.trainer.losses.Loss`. Raises `ConfigError`."""

    report: Report

    def __init__(self, config: Config, counts: Counts, device: torch.device) -> None:
        path = str(config.loss_fn.class_path)
        self._name = f"{_KEY} {path}"
        make = named(path, _KEY)
        settings = getattr(config, config.declaration.loss_section)
        try:
            self._loss = make(settings, counts, device, **config.loss_fn.kwargs)
        except Exception as error:  # custom classes raise anything
            raise ConfigError(f"{self._name}: {_describe(error)}") from error
        if not callable(self._loss):
            raise ConfigError(f"{self._name}: it has no method __call__(batch, scores)")
        report = getattr(self._loss, "report", None)
        if report is not None and not isinstance(report, Report):
            raise ConfigError(f"{self._name}: its report is {type(report).__name__}, not tandem.trainer.losses.Report")
        self.report = report or Report((), counts.tokens, device)

    def __call__(self, batch: MicroBatch, scores_BT: Scores) -> torch.Tensor:
        """Return the micro-batch's part of the loss. Raises `TrainingError` unless it is a scalar with gradient."""
        try:
            value = self._loss(batch, scores_BT)
        except TandemError:
            raise
        except Exception as error:
            raise TrainingError(f"{self._name}: {_describe(error)}") from error
        complaint = _complaint(value, needs_gradient=scores_BT[0].requires_grad)
        if complaint is not None:
            raise TrainingError(
                f"{self._name} returned {complaint}: a loss is a scalar tensor, computed from the scores"
            )
        loss: torch.Tensor = value
        return loss


def try_out(config: Config) -> None:
    """Check a custom loss with a micro-batch of two sequences (of pairs for DPO), as in the run.

    Raises `ConfigError` if it cannot be made, or fails, or if its loss or gradient is not finite.
    """
    if config.loss_fn.class_path is None:
        return
    batch, scores_BT = _trial(config)
    counted = batch.loss_mask_BT
    counts = Counts(tokens=int(counted.sum()), sequences=len(counted), positive_tokens=int(counted.sum()))
    loss = CustomLoss(config, counts, torch.device("cpu"))
    try:
        value = loss(batch, scores_BT)
        value.backward()  # type: ignore[no-untyped-call]
    except (TrainingError, RuntimeError) as error:
        raise ConfigError(f"{error} (tried out on {len(counted)} sequences)") from error
    gradient = scores_BT[0].grad
    for name, tensor in (("loss", value), ("gradient", gradient)):
        if tensor is None or not tensor.isfinite().all():
            fault = "no" if tensor is None else "no finite"
            raise ConfigError(
                f"{_KEY} {config.loss_fn.class_path} has {fault} {name} (tried out on {len(counted)} sequences)"
            )


@contextmanager
def blamed(config: Config) -> Iterator[None]:
    """Let a `TrainingError` name the loss if it is a custom one."""
    try:
        yield
    except TrainingError as error:
        path = config.loss_fn.class_path
        if path is None or path in str(error):
            raise
        raise type(error)(f"{error} ({_KEY} {path})") from error


def _trial(config: Config) -> tuple[MicroBatch, Scores]:
    """Return a micro-batch with the configured loss inputs, and scores of it."""
    shape = (2 * config.sequences_per_sample, 4)
    mask_BT = torch.tensor([[False, False, True, True]]).expand(shape).clone()
    logprobs_BT = torch.where(mask_BT, torch.linspace(-2.0, -0.5, mask_BT.numel()).view(shape), 0.0)
    batch = MicroBatch(
        rows=tuple(range(shape[0])),
        lengths_B=torch.full(shape[:1], shape[1]),
        token_ids_BT=torch.ones(shape, dtype=torch.int64),
        attention_mask_BT=torch.ones(shape, dtype=torch.bool),
        loss_mask_BT=mask_BT,
        columns={
            column.name: _tried(config, column, mask_BT, logprobs_BT)
            for column in config.columns_of(config.num_optimizer_steps)
        },
    )
    if config.declaration.head_of("policy") != "vocabulary":
        return batch, TokenValues(logprobs_BT.requires_grad_())
    entropy_BT = torch.where(mask_BT, 1.0, 0.0)
    scores = logprobs_BT.requires_grad_(), entropy_BT, mask_BT.float()
    if batch.teacher_topk_ids_BTN is None:
        return batch, TokenScores(*scores)
    return batch, StudentScores(*scores, logprobs_BT[..., None] - batch.teacher_topk_ids_BTN)


def _tried(config: Config, column: ColumnDeclaration, mask_BT: torch.Tensor, logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Return a plausible column: ones, or other log-probabilities than those given."""
    if column.num_each is not None:
        num = column.num_each(config)
        return torch.arange(num, dtype=getattr(torch, column.dtype)).expand(*mask_BT.shape, num)
    if column.model or column == GENERATION_LOGPROBS:
        return logprobs_BT.clone()
    is_there_BT = mask_BT if column.source == "engine" else torch.ones_like(mask_BT)
    return torch.where(is_there_BT, 1.0, column.fill).to(getattr(torch, column.dtype))


def _complaint(value: object, *, needs_gradient: bool) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}"
    if value.ndim:
        return f"a tensor of shape {list(value.shape)}"
    if not value.is_floating_point():
        return f"a number of type {str(value.dtype).removeprefix('torch.')}"
    if needs_gradient and not value.requires_grad:
        return "a number without a gradient"
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
