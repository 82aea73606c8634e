"""Gradients and steps that clients ask for: what is checked of them, and the calls that they become."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import numpy as np

from tandem.common.messages import LARGEST, LossOfCall
from tandem.serving.tinker import proto, requests
from tandem.serving.tinker.calls import INPUTS, AddGradients, Answer, GivenSequence, GradientsScored, TakeStep
from tandem.serving.tinker.futures import FinishedRequest
from tandem.serving.tinker.requests import TinkerRefused

_MOST_TOKENS = 1 << 22
"""Tokens of one gradient."""
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    **dict.fromkeys(("ppo", "cispo"), _CLIP),
    "dro": {"beta": 0.05},
}
"""Arguments of each loss, with their defaults."""
_LOSSES: tuple[str, ...] = get_args(LossOfCall)
_INPUTS_OF = {"cross_entropy": ("weights",)}
_OF_SAMPLES = ("logprobs", "advantages")


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what clients may send."""

    max_length: int
    """Tokens of a sequence."""
    vocabulary: int
    most_tokens: int
    """Tokens that a key may have in progress."""


def gradient_call(body: proto.GradientRequest, limits: ClientLimits) -> AddGradients:
    """Return the call for a gradient, or for scores. Raises `TinkerRefused`."""
    if body.problem:
        raise TinkerRefused(body.problem)
    if body.loss not in _LOSSES:
        hint = "custom losses run in the client: forward_backward_custom" if body.loss == "custom" else ""
        raise TinkerRefused(f"loss_fn: {body.loss[:100]!r} is not served; {hint or ', '.join(_LOSSES) + ' are'}")
    settings = dict(_SETTINGS[body.loss])
    for name, value in body.settings.items():
        if name not in settings or isinstance(value, str) or not abs(value) <= LARGEST:
            raise TinkerRefused(f"loss_fn_config: {name[:100]!r} of {body.loss} is not served, or no finite number")
        settings[name] = value
    if not body.data:
        raise TinkerRefused("data: there is none")
    if sum(len(each.token_ids) + 1 for each in body.data) > min(_MOST_TOKENS, limits.most_tokens):
        raise TinkerRefused(f"data: more than {min(_MOST_TOKENS, limits.most_tokens)} tokens")
    return AddGradients(
        sequences=[_sequence(row, each, body.loss, limits) for row, each in enumerate(body.data)],
        loss=body.loss,  # type: ignore[arg-type]  # one of them, as was checked
        settings=settings,
        has_gradient=not body.is_forward,
    )


def _sequence(row: int, datum: proto.TrainingDatum, loss: str, limits: ClientLimits) -> GivenSequence:
    """Return the sequence of a datum: its tokens, and one more to score the last target in its place."""
    token_ids, targets = datum.token_ids, datum.inputs.get("target_tokens")
    size = len(token_ids)
    if targets is None or targets.dtype != np.int64 or len(targets) != size or not size:
        raise TinkerRefused(f"data[{row}].target_tokens: must be int64, one for each of at least one input token")
    if size + 1 > limits.max_length:
        raise TinkerRefused(
            f"data[{row}]: {size + 1} tokens, and policy.max_total_sequence_length is {limits.max_length}"
        )
    all_ids, scored = np.concatenate([token_ids, targets[-1:]]), np.concatenate([token_ids[:1], targets])
    if min(all_ids.min(), scored.min()) < 0 or max(all_ids.max(), scored.max()) >= limits.vocabulary:
        raise TinkerRefused(f"data[{row}]: token ids must be from 0 to {limits.vocabulary - 1}")
    inputs = {name: np.zeros(size + 1, dtype=np.float32) for name in INPUTS}
    input_names = _INPUTS_OF.get(loss, _OF_SAMPLES)
    for name in input_names:
        values = datum.inputs.get(name)
        if values is None and name == "weights":
            values = np.ones(size, dtype=np.float32)
        if values is None or values.dtype != np.float32 or len(values) != size:
            raise TinkerRefused(f"data[{row}].{name}: must be float32, one for each of the {size} input tokens")
        if not (np.abs(values) <= LARGEST).all():
            raise TinkerRefused(f"data[{row}].{name}: must be finite")
        inputs[name][1:] = values
    for name in datum.inputs:
        if name not in ("target_tokens", *input_names):
            advice = "; advantages of 0 leave tokens out" if name in ("mask", "weights") else ""
            raise TinkerRefused(
                f"data[{row}].{name[:100]}: {loss} takes target_tokens and {' and '.join(input_names)}{advice}"
            )
    return GivenSequence(token_ids=all_ids.astype(np.int32), targets=scored.astype(np.int32), inputs=inputs)


def scores_call(token_ids: list[int]) -> AddGradients:
    """Return the call for the log-probabilities of a prompt."""
    size = len(token_ids)
    sequence = GivenSequence(
        token_ids=np.array(token_ids, dtype=np.int32),
        targets=np.array(token_ids, dtype=np.int32),
        inputs=dict.fromkeys(INPUTS, np.zeros(size, dtype=np.float32)),
    )
    return AddGradients(sequences=[sequence], loss="cross_entropy", settings={}, has_gradient=False)


def scored_result(answer: Answer) -> FinishedRequest:
    """Return the log-probabilities of the targets: those of the tokens that follow the first."""
    assert isinstance(answer, GradientsScored), "as asked for"
    return FinishedRequest(
        proto.gradient_output([each[1:] for each in answer.logprobs], {"loss:sum": answer.loss}), True
    )


def step_call(params: requests.AdamParams | None) -> TakeStep:
    """Return the call for a step of the optimizer. Raises `TinkerRefused`."""
    if params is None:
        raise TinkerRefused("adam_params: only AdamW is served")
    parameters = msgspec.structs.asdict(params)
    for name, value in parameters.items():
        largest = math.nextafter(1.0, 0.0) if name.startswith("beta") else LARGEST
        if not 0.0 <= value <= largest:
            raise TinkerRefused(
                f"adam_params.{name}: {value}, must be from 0 to {'below 1' if largest < 1 else LARGEST}"
            )
    max_grad_norm = parameters.pop("grad_clip_norm")
    return TakeStep(max_grad_norm=max_grad_norm, **parameters)
