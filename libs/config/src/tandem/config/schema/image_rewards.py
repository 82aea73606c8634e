"""The functions that score responses about images, and their settings, as NeMo-RL has them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import ConfigSection, NonEmptyStr

Number = Annotated[float, Meta(ge=-1e6, le=1e6)]


class RewardArguments(ConfigSection, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of all functions; each has some of them."""

    think_tag: NonEmptyStr = "think"
    """Tag of the reasoning."""
    answer_tag: NonEmptyStr = "answer"
    """Tag of the answer."""
    tag: NonEmptyStr = "answer"
    """The same, for ``math_expr``."""
    giou_penalty_thres: Number = 10.0
    """Intersection over union below which boxes that are far apart cost more than none (GIoU)."""


class RewardFunctionConfig(ConfigSection, frozen=True, kw_only=True):
    """An entry of `env.NAME.reward_functions`."""

    name: Literal["format", "exact_alnum", "math_expr", "bbox_giou"]
    """The function."""
    weight: Annotated[float, Meta(ge=0.0, le=1e6)]
    """Its share of the reward, relative to the others'."""
    kwargs: RewardArguments | None = None
    """Its arguments."""


ARGUMENTS = {
    "format": ("think_tag", "answer_tag"),
    "exact_alnum": ("answer_tag",),
    "math_expr": ("tag",),
    "bbox_giou": ("giou_penalty_thres", "answer_tag"),
}
"""Arguments that each function has."""
IMAGE_ENVIRONMENTS = ("clevr-cogent", "geometry3k", "refcoco", "vlm")
"""Built-in environments that score by such functions."""
