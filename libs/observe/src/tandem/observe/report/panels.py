"""The eight panels of a report, with the metrics that each draws, by algorithm.

A panel has two axes, because a length and a share, or a norm and a share, have no common scale. Its first curve is
solid, the others dashed; several runs differ in colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tandem.config.schema.declarations import ALGORITHMS

Points = Sequence[tuple[int, float]]
"""Steps and values of a curve."""


class PanelCurve(NamedTuple):
    """A metric, and its label."""

    name: str
    label: str


class ReportPanel(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of one panel, drawn as far as runs have them."""

    title: str
    left_axis: tuple[PanelCurve, ...] = ()
    """Curves on the left axis."""
    right_axis: tuple[PanelCurve, ...] = ()
    missing: str
    """Text shown if no run has any of the curves."""

    def select_drawn(self, curves: Iterable[Mapping[str, Points]]) -> tuple[list[PanelCurve], list[PanelCurve]]:
        """Return the curves of both axes that some run has. A KL that stays 0 means that there is no reference."""
        drawn_names = {
            name
            for of_run in curves
            for name, points in of_run.items()
            if (points if name != "kl" else any(value for _, value in points))
        }
        left_curves, right_curves = (
            [curve for curve in axis if curve.name in drawn_names] for axis in (self.left_axis, self.right_axis)
        )
        return left_curves, right_curves


SECONDS, MEMORY = "seconds by phase", "memory"
"""Titles of the panels with curves other than metrics of the algorithm."""
PHASES = {
    "generation": "generation",
    "get_logprobs": "log-probabilities",
    "policy_training": "training",
    "refit": "refit",
    "validation": "validation",
    "checkpointing": "checkpoints",
}
"""Parts of a step's seconds, in stacking order."""
TOTAL = PanelCurve("seconds/total", "a whole step")
_PHASES_OF_MEMORY = ("generation", "training", "refit")
_KINDS = ("trainer", "engine")
_PEAKS = tuple(PanelCurve(f"memory/{kind}", f"{kind}, GB") for kind in _KINDS)


def _panel(
    title: str, left_curves: Sequence[tuple[str, str]], right_curves: Sequence[tuple[str, str]] = (), missing: str = ""
) -> ReportPanel:
    return ReportPanel(
        title=title,
        left_axis=tuple(PanelCurve(*pair) for pair in left_curves),
        right_axis=tuple(PanelCurve(*pair) for pair in right_curves),
        missing=missing or "no such metric is recorded",
    )


_LAST = (
    ReportPanel(title=SECONDS, left_axis=(TOTAL,), missing="no seconds are recorded"),
    ReportPanel(title=MEMORY, left_axis=_PEAKS, missing="no memory is recorded"),
)
_LEARNING_RATE = _panel("learning rate", [("learning_rate", "learning rate")])
_NOT_VALIDATED = "nothing was validated"
_ROLLED_OUT = (
    _panel("reward", [("reward", "reward"), ("training_reward", "as trained on"), ("filtered_reward", "as filtered")]),
    _panel("held-out accuracy", [("val_accuracy", "accuracy"), ("val_reward", "reward")], missing=_NOT_VALIDATED),
    _panel(
        "KL and entropy",
        [("entropy", "entropy, nats a token")],
        [("kl", "KL from the reference"), ("approx_kl", "KL of a step")],
    ),
    _panel(
        "lengths and truncation",
        [("mean_generation_length", "mean length"), ("max_generation_length", "longest")],
        [("truncated_fraction", "share cut off")],
    ),
    _panel("gradient norm and clipping", [("grad_norm", "gradient norm")], [("clip_fraction", "share clipped")]),
    _panel(
        "log-probability gap, engine to trainer",
        [("token_mult_prob_error", "factor between probabilities")],
        [("sampling_importance_ratio", "importance weight")],
    ),
    *_LAST,
)
_SUPERVISED = (
    _panel("loss", [("loss", "loss")]),
    _panel("held-out loss", [("val_loss", "loss")], missing=_NOT_VALIDATED),
    _panel(
        "token accuracy and entropy", [("entropy", "entropy, nats a token")], [("token_accuracy", "token accuracy")]
    ),
    _panel("batch sizes", [("num_valid_tokens", "tokens in the loss")], [("num_valid_samples", "sequences")]),
    _panel("gradient norm", [("grad_norm", "gradient norm")]),
    _LEARNING_RATE,
    *_LAST,
)
_PREFERENCES = (
    _panel("loss", [("loss", "loss"), ("preference_loss", "of preferences"), ("sft_loss", "of the chosen")]),
    _panel("held-out accuracy", [("val_accuracy", "accuracy")], [("val_loss", "loss")], missing=_NOT_VALIDATED),
    _panel(
        "rewards of chosen and rejected",
        [("rewards_chosen_mean", "chosen"), ("rewards_rejected_mean", "rejected")],
        [("accuracy", "accuracy")],
    ),
    *_SUPERVISED[3:],
)


def panels_of(algorithms: Iterable[str]) -> tuple[ReportPanel, ...]:
    """Return the eight panels for runs of these algorithms; for several, each panel has the curves of all."""
    sets = list(dict.fromkeys(_panels(name) for name in algorithms))
    return tuple(_merge(panels) for panels in zip(*sets, strict=True))


def _panels(algorithm: str) -> tuple[ReportPanel, ...]:
    declared = ALGORITHMS[algorithm]
    if declared.rolls_out:
        return _ROLLED_OUT
    return _PREFERENCES if declared.learns_preferences else _SUPERVISED


def _merge(panels: Sequence[ReportPanel]) -> ReportPanel:
    left_curves = tuple(dict.fromkeys(curve for panel in panels for curve in panel.left_axis))
    return ReportPanel(
        title=" / ".join(dict.fromkeys(panel.title for panel in panels)),
        left_axis=left_curves,
        right_axis=tuple(dict.fromkeys(c for panel in panels for c in panel.right_axis if c not in left_curves)),
        missing=panels[0].missing,
    )


def peak_memory(curves: Mapping[str, Points]) -> dict[str, list[tuple[int, float]]]:
    """Return the peak memory of a process of each kind in any phase of a step, as curves."""
    peaks: dict[str, dict[int, float]] = {}
    for kind in _KINDS:
        for phase in _PHASES_OF_MEMORY:
            for step, value in curves.get(f"memory_{phase}_{kind}_gb", ()):
                steps = peaks.setdefault(f"memory/{kind}", {})
                steps[step] = max(steps.get(step, 0.0), value)
    return {name: sorted(steps.items()) for name, steps in peaks.items()}
