"""The calls of a front end on one rank: gradients add up until an optimizer step uses them.

Several sets of weights may take turns in the policy's parameters, each with its optimizer and gradient. Others are kept
as they were published, to be scored with and brought to engines again.

All ranks get the same calls in the same order. They wait for each other only inside the collective operations of the
model. What a call has must be checked before it is sent: an error on one rank alone would leave the others waiting.

A token has the probability ``p`` under the policy, ``q`` under the one that sampled it, and the advantage ``A``.

* cross_entropy: ``-weight * log p``
* importance_sampling: ``-(p / q) * A``
* ppo: ``-min(r * A, clip(r) * A)`` with ``r = p / q``, clipped to ``clip_low_threshold .. clip_high_threshold``
* cispo: ``-clip(r) * log p * A``, without a gradient through the clipped ratio
* dro: ``-(log p * A - beta / 2 * (log p - log q)^2)``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common import messages, values, wire
from tandem.common.errors import NotFiniteError, WireError
from tandem.config.schema.columns import TEACHER_TOPK_INDICES, ColumnDeclaration
from tandem.launch.service import ServiceContext
from tandem.samples.batch import Float32s, SampleBatch
from tandem.trainer.backend import LossOfMicroBatch, TrainerBackend
from tandem.trainer.batching.shard import BatchShard, unpad_into
from tandem.trainer.micro_batches import MicroBatch
from tandem.trainer.scores import Scores, StudentScores, TokenScores

INPUTS = ("weights", "advantages", "logprobs")
"""Loss inputs of each token."""
_DTYPES = {
    "lengths_S": "int32",
    "rank_S": "int32",
    "prompt_S": "int32",
    "prompt_lengths_S": "int32",
    "token_ids_T": "int32",
    "loss_mask_T": "bool",
    **{f"{name}_T": "float32" for name in INPUTS},
}
_TARGETS = "targets_T"
"""Tokens that are scored in the place of others: as a student scores those of a teacher."""
_DO_THEY_MATCH = (
    "; ratios of probabilities are exp(log-probability - logprobs): are these logprobs those of the targets?"
)
_COLUMNS = {name: ColumnDeclaration(name=name, source="coordinator") for name in INPUTS}

Progress = Any
"""An optimizer's state and a gradient, as a policy itself keeps them."""
Inputs = Mapping[str, torch.Tensor]
"""``weights``, ``advantages`` and ``logprobs`` of the tokens."""
Settings = Mapping[str, float]
LossOfTokens = Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
"""From the log-probabilities of tokens, their inputs and the loss's arguments to a loss for each."""


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -inputs["weights"] * logprobs


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    return -_clipped(_ratio(logprobs, inputs), settings).detach() * logprobs * inputs["advantages"]


def _dro(logprobs: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    distance = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance)


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, settings: Settings) -> torch.Tensor:
    return torch.clamp(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


LOSSES: Mapping[str, LossOfTokens] = {
    each.__name__.removeprefix("_"): each for each in (_cross_entropy, _importance_sampling, _ppo, _cispo, _dro)
}
"""Losses by their names in `LossOfCall`."""

OF_RATIOS = frozenset({"importance_sampling", "ppo", "cispo"})
"""Losses with ratios of probabilities, which grow exponentially with differences of log-probabilities."""


class CalledPolicy(Protocol):
    """One rank's part of a policy. Methods are collective, but for those that only move this rank's memory."""

    def add_gradient(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Add the gradient of the loss of these micro-batches on all ranks to what there is. Return the loss."""
        ...

    def score(self, micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch) -> float:
        """Return the loss of these micro-batches on all ranks, without a gradient."""
        ...

    def complete(self, logprobs_T: Float32s) -> None:
        """Give all ranks of a replica what a loss has written on those that have scores."""
        ...

    def step(self, command: messages.StepOptimizer, loss: float, *, has_gradient: bool) -> float:
        """Take a step of AdamW with the gradient, which is that of `loss`, or with zeros if there is none.

        Return its norm before clipping. Raises `NotFiniteError`, and then no weight has changed. Either way the
        gradient is forgotten.
        """
        ...

    def trained_here(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of all that steps change, but for the optimizer's state, by reference."""
        ...

    def forget_gradient(self) -> None:
        """Forget the gradient."""
        ...

    def forget_steps(self) -> None:
        """Make the optimizer as if no step had been taken, and forget the gradient."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint, bit for bit, in the memory of the weights. Raises `CheckpointError`."""
        ...

    def set_aside(self, *, has_gradient: bool) -> Progress:
        """Return the optimizer's state, and the gradient if there is one; then `forget_steps`."""
        ...

    def take_back(self, progress: Progress) -> None:
        """Go on with what was set aside."""
        ...


class _Set(NamedTuple):
    """A set of weights that waits for its turn."""

    weights: dict[str, torch.Tensor]
    progress: Progress | None
    """Its optimizer and gradient; None for a new one."""
    loss: float
    has_gradient: bool
    why_dropped: str
    """Why its last gradient was dropped; empty if it was not, or another has come since."""


class RankCalls:
    """The answers of one rank."""

    def __init__(self, context: ServiceContext, backend: TrainerBackend, vocabulary: int) -> None:
        """Begin with the policy as it is, whose weights are kept to go back to."""
        self._context = context
        self._backend = backend
        self._policy = _called(backend)
        self._config = context.config
        self._vocabulary = vocabulary
        self._first = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self._policy.trained_here().items()
        }
        """The weights that the run began with."""
        self._loss = 0.0
        """Loss whose gradient there is."""
        self._has_gradient = False
        self._why_dropped = ""
        """Why the last gradient was dropped; empty if it was not, or another has come since."""
        self._number = 0
        """The set in the policy's parameters."""
        self._waiting: dict[int, _Set] = {}
        """Other sets that are trained, by number."""
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        """Weights that were published, by number of their set, in the host's memory."""

    @staticmethod
    def phase_of(command: messages.CallCommand) -> str:
        """Return what a command does, for error messages."""
        match command:
            case messages.AddGradient():
                return f"{'adding a gradient' if command.has_gradient else 'scoring'} ({command.loss})"
            case messages.StepOptimizer():
                return "stepping the optimizer"
            case messages.RestoreTraining():
                return f"restoring {command.folder or 'the first weights'}"
            case messages.SwitchTraining():
                return f"switching to set {command.number}"
            case messages.KeepWeights():
                return f"keeping the weights as set {command.number}"
            case unknown:
                assert_never(unknown)

    def handle(self, command: messages.CallCommand, arrays: wire.Arrays) -> None:
        """Carry out a call and reply."""
        match command:
            case messages.AddGradient():
                self._add_gradient(command, arrays)
            case messages.StepOptimizer():
                self._step(command)
            case messages.RestoreTraining():
                self._restore(command)
            case messages.SwitchTraining():
                self._switch(command)
            case messages.KeepWeights():
                self._keep(command)
            case unknown:
                assert_never(unknown)

    def _add_gradient(self, command: messages.AddGradient, arrays: wire.Arrays) -> None:
        table, samples = self._read(arrays)
        settings = self._config.policy
        shares_prompts = settings.share_prompts and self._backend.shares_prompts
        shard = BatchShard(settings, table, samples, self._backend.replicas("policy"), shares_prompts=shares_prompts)
        columns: dict[ColumnDeclaration, NDArray[Any]] = {
            column: samples.columns[f"{name}_T"] for name, column in _COLUMNS.items()
        }
        if _TARGETS in samples.columns:
            columns[TEACHER_TOPK_INDICES] = samples.columns[_TARGETS][:, None]
        rows = range(len(table))
        groups = shard.training(rows) if command.has_gradient else shard.scoring([rows])
        micro_batches = shard.laid_out(groups, self._backend.device, columns)
        logprobs_T = np.zeros(len(samples.token_ids_T), dtype=np.float32)
        loss_of = partial(self._loss_of, command, samples, logprobs_T)
        if command.has_gradient:
            loss = self._policy.add_gradient(micro_batches, loss_of)
            self._loss += loss
            self._has_gradient, self._why_dropped = True, ""
        else:
            loss = self._policy.score(micro_batches, loss_of)
        if wrong := values.beyond(loss):
            reason = f"the loss is {wrong}{_DO_THEY_MATCH if command.loss in OF_RATIOS else ''}"
            if command.has_gradient:
                self._drop_gradient(reason)
                reason = f"{reason}: its gradient, and those of the calls before, are dropped"
            raise NotFiniteError(reason)
        self._policy.complete(logprobs_T)
        reply = messages.GradientAdded(
            command_id=command.command_id, loss=loss, logprobs=logprobs_T.astype("<f4").tobytes()
        )
        self._context.reply(command.command_id, reply)

    def _loss_of(
        self,
        command: messages.AddGradient,
        samples: SampleBatch,
        logprobs_T: Float32s,
        micro_batch: MicroBatch,
        scores_BT: Scores,
    ) -> torch.Tensor:
        """Return the loss of a micro-batch, and write its log-probabilities to those of the shard."""
        assert isinstance(scores_BT, TokenScores | StudentScores), "those of a policy"
        logprobs_BT = scores_BT.other_logprobs[..., 0] if isinstance(scores_BT, StudentScores) else scores_BT.logprobs
        unpad_into(logprobs_T, logprobs_BT, samples, micro_batch.rows)
        mask_BT = micro_batch.loss_mask_BT
        loss_BT = LOSSES[command.loss](logprobs_BT, micro_batch.columns, command.settings)
        return torch.where(mask_BT, loss_BT, 0.0).sum()

    def _step(self, command: messages.StepOptimizer) -> None:
        # A client may have sent it before it could know. Without its gradient it would still move the weights.
        if self._why_dropped:
            raise NotFiniteError(f"no step was taken: its gradient was dropped, because {self._why_dropped}")
        loss, has_gradient = self._loss, self._has_gradient
        self._loss, self._has_gradient = 0.0, False
        try:
            norm = self._policy.step(command, loss, has_gradient=has_gradient)
        except NotFiniteError as error:
            self._why_dropped = str(error)
            raise
        self._context.reply(
            command.command_id, messages.OptimizerStepped(command_id=command.command_id, grad_norm=norm)
        )

    @torch.no_grad()
    def _restore(self, command: messages.RestoreTraining) -> None:
        self._forget_gradient()
        if command.folder:
            self._policy.load(Path(command.folder))
        else:
            for name, tensor in self._policy.trained_here().items():
                tensor.copy_(self._first[name])
        if not (command.folder and command.with_optimizer):
            self._policy.forget_steps()
        self._context.reply(command.command_id, messages.TrainingRestored(command_id=command.command_id))

    @torch.no_grad()
    def _switch(self, command: messages.SwitchTraining) -> None:
        policy, number = self._policy, command.number
        trained_tensors = policy.trained_here()
        if number != self._number:
            new = self._waiting.pop(number, None)
            if new is None:
                weights = self._kept.get(number, self._first)
                new = _Set(weights, None, 0.0, has_gradient=False, why_dropped="")
            if self._number not in self._kept:  # else no call has changed it
                before = {name: tensor.clone() for name, tensor in trained_tensors.items()}
                progress = policy.set_aside(has_gradient=self._has_gradient)
                self._waiting[self._number] = _Set(before, progress, self._loss, self._has_gradient, self._why_dropped)
            if new.progress is not None:
                policy.take_back(new.progress)
            for name, tensor in trained_tensors.items():
                tensor.copy_(new.weights[name])
            self._number, self._loss, self._has_gradient = number, new.loss, new.has_gradient
            self._why_dropped = new.why_dropped
        self._context.reply(command.command_id, messages.TrainingRestored(command_id=command.command_id))

    @torch.no_grad()
    def _keep(self, command: messages.KeepWeights) -> None:
        """Copy the weights to where those of the set before them were."""
        weights, copies = self._policy.trained_here(), self._kept.get(command.number)
        if copies is None:
            self._kept[command.number] = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
        else:
            for name, tensor in weights.items():
                copies[name].copy_(tensor)
        self._context.reply(command.command_id, messages.TrainingRestored(command_id=command.command_id))

    def _drop_gradient(self, reason: str) -> None:
        self._forget_gradient()
        self._why_dropped = reason

    def _forget_gradient(self) -> None:
        self._policy.forget_gradient()
        self._loss, self._has_gradient, self._why_dropped = 0.0, False, ""

    def _read(self, arrays: wire.Arrays) -> tuple[SampleBatch, SampleBatch]:
        """Return the table of all sequences, and this rank's own. Raises `WireError`."""
        expected_dtypes = _DTYPES | ({_TARGETS: "int32"} if _TARGETS in arrays else {})
        for name, dtype in expected_dtypes.items():
            if name not in arrays or arrays[name].dtype != np.dtype(dtype) or arrays[name].ndim != 1:
                raise WireError(f"AddGradient.{name}: must be {dtype} of one dimension")
        table_columns = {name: array for name, array in arrays.items() if name.endswith("_S")}
        lengths_S, prefixes_S = table_columns["lengths_S"], table_columns["prompt_lengths_S"]
        if (
            any(len(array) != len(lengths_S) for array in table_columns.values())
            or not len(lengths_S)
            or lengths_S.min() < 1
        ):
            raise WireError("AddGradient.lengths_S: must be at least 1, for as many sequences as all else of the table")
        if prefixes_S.min() < 0 or (prefixes_S >= lengths_S).any():
            raise WireError("AddGradient.prompt_lengths_S: must be from 0 to below lengths_S")
        table = SampleBatch(**table_columns)
        rows = table.rows_of(self._backend.data_parallel_rank)
        tokens = {name: array for name, array in arrays.items() if name.endswith("_T")}
        rank_columns = {name: array[rows] for name, array in table_columns.items()}
        lengths_S = rank_columns["lengths_S"]
        if any(len(array) != lengths_S.sum() for array in tokens.values()):
            raise WireError("AddGradient: its tokens are not as many as lengths_S says")
        samples = SampleBatch(**rank_columns, **tokens)
        samples.check_tokens(self._vocabulary)
        if _TARGETS in tokens:
            SampleBatch(lengths_S=lengths_S, token_ids_T=tokens[_TARGETS]).check_tokens(self._vocabulary)
        return table, samples


def _called(backend: TrainerBackend) -> CalledPolicy:
    """Return the policy of a backend, as calls train it."""
    # Imported on use, as backends are.
    from tandem.trainer.backends.dtensor import DTensorBackend

    if isinstance(backend, DTensorBackend):
        from tandem.trainer.calls.of_dtensor import OfDTensor

        return OfDTensor(backend)
    from tandem.trainer.backends.megatron.backend import MegatronBackend
    from tandem.trainer.calls.of_megatron import OfMegatron

    assert isinstance(backend, MegatronBackend), "there are two"
    return OfMegatron(backend)
