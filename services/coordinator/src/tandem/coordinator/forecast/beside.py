"""Models that trainers hold beside the policy, each with the parallel sizes of its own section."""

from __future__ import annotations

import msgspec

from tandem.config import Config
from tandem.config.schema.columns import Model
from tandem.coordinator.forecast.sides import ForecastSide, model_shape, training
from tandem.refit.adapters.catalogue import ModelShape


class BesideModel(msgspec.Struct, frozen=True):
    """A model beside the policy, as the trainers hold it."""

    name: str
    """Its name, with its number if there are several teachers."""
    config: Config
    """Configuration `as_policy`."""
    side: ForecastSide
    is_trained: bool
    has_processes: bool
    """Whether it has processes of its own, rather than the policy's."""
    unknown: str = ""
    """Why its shape is unknown, so that the policy's stands for it; empty if it is known."""


def describe_beside_models(config: Config, shape: ModelShape) -> tuple[BesideModel, ...]:
    """Return the models beside the policy, which has this shape. Raise `ModelError` if a model's files are unusable."""
    return tuple(_describe_model(config, model, number, shape) for model, number in models_beside(config))


def models_beside(config: Config) -> list[tuple[Model, int]]:
    """Return the models beside the policy, each with its number among several teachers.

    Leave out a reference in the policy's processes: its section and its ranks are the policy's.
    """
    return [
        (model, number)
        for model in config.holds
        if model != "policy" and (model != "reference" or model in config.processes_of)
        for number in range(config.num_of(model))
    ]


def as_policy(config: Config, model: Model, number: int) -> Config:
    """Return the configuration as if a model were the policy, and the ranks that hold it all trainers."""
    model_config = config.replace_policy(config.settings_of(model, number))
    if model not in config.processes_of:
        return model_config
    return msgspec.structs.replace(
        model_config, cluster=msgspec.structs.replace(model_config.cluster, trainers=config.processes_of[model])
    )


def name_of(config: Config, model: Model, number: int) -> str:
    """Return the name of a model for people, with its number if there are several."""
    return f"{model} {number + 1}" if config.num_of(model) > 1 else model


def _describe_model(config: Config, model: Model, number: int, of_policy: ModelShape) -> BesideModel:
    model_config = as_policy(config, model, number)
    shape_or_reason = of_policy if model == "reference" else model_shape(model_config)
    shape, unknown = (of_policy, shape_or_reason) if isinstance(shape_or_reason, str) else (shape_or_reason, "")
    is_trained, head = model in config.declaration.trains, config.declaration.head_of(model)
    if head != "vocabulary" and shape.geometry is not None and not shape.has_scalar_head:
        shape = shape.add_scalar_head(has_bias=head == "value")
    # On DTensor, trained weights are in float32 whatever the precision of the passes.
    in_float32 = is_trained and not model_config.policy.megatron_cfg.enabled
    return BesideModel(
        name=name_of(config, model, number),
        config=model_config,
        side=ForecastSide(
            "trainer",
            training(model_config),
            shape.cast("float32" if in_float32 else model_config.policy.precision),
        ),
        is_trained=is_trained,
        has_processes=model in config.processes_of,
        unknown=unknown,
    )
