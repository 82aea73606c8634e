"""Arguments for Megatron-Core: completed, checked against its own classes, and those of low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.distribution import install_command
from tandem.common.errors import nearest
from tandem.config.conform import conform, describe_unknown_key
from tandem.config.installed.megatron_arguments import (
    RESERVED,
    find_obstacle,
    find_release,
    is_installed,
    list_arguments,
    list_defaults,
)
from tandem.config.installed.sources import find_package
from tandem.config.problem import InvalidValue, ProblemCollector
from tandem.config.schema import MODELS, Config, MegatronCfg, ModelConfig

if TYPE_CHECKING:
    from tandem.config.schema import MegatronCfg


def fit_megatron(config: Config, *, to_run: bool) -> Config:
    """Return the configuration with Megatron-Core's arguments converted to their types, where it is enabled.

    Raises `InvalidValue` for an unknown argument. Without Megatron-Core, names and types are left unchecked.
    """
    return _change_each_model(config, lambda key, model: _fit(key, model, to_run=to_run))


def find_missing_megatron(config: Config) -> Iterator[InvalidValue]:
    """Yield a problem for each model that Megatron-Core trains where it is not installed, or cannot train."""
    for name in MODELS:
        model: ModelConfig | None = getattr(config, name)
        if model is not None and model.megatron_cfg.enabled and not is_installed():
            text = f"true, but Megatron-Core is not installed: {install_command('megatron')}"
            yield InvalidValue(f"{name}.megatron_cfg.enabled", text, is_of_machine=True)
        elif model is not None and model.megatron_cfg.enabled and (obstacle := find_obstacle()) is not None:
            yield InvalidValue(f"{name}.megatron_cfg.enabled", f"true, but {obstacle}", is_of_machine=True)


def unfit_megatron(config: Config) -> Config:
    """Return the configuration without the values that `fit_megatron` took from other keys."""
    return _change_each_model(config, _unfit)


def _change_each_model(config: Config, change: Callable[[str, ModelConfig], MegatronCfg]) -> Config:
    """Return the configuration with the Megatron-Core section of each model changed."""
    changed: dict[str, Any] = {}
    if config.teachers is not None:
        changed["teachers"] = tuple(
            msgspec.structs.replace(teacher, megatron_cfg=change(f"teachers[{index}].megatron_cfg", teacher))
            for index, teacher in enumerate(config.teachers)
        )
    for name in MODELS:
        model: ModelConfig | None = getattr(config, name)
        if model is not None:
            changed[name] = msgspec.structs.replace(model, megatron_cfg=change(f"{name}.megatron_cfg", model))
    return msgspec.structs.replace(config, **changed)


def _fit(key: str, model: ModelConfig, *, to_run: bool) -> MegatronCfg:
    megatron = model.megatron_cfg
    if not megatron.enabled:
        return megatron
    if to_run and find_package("transformer_engine") is None:
        for products in list_products(megatron):  # Megatron-Core would silently train without it
            text = f"{products.value} needs Transformer Engine, which is not installed here"
            raise InvalidValue(f"{key}.{products.key}", text)
    elif to_run and megatron.forwarded.get("attention_backend") == "local":  # disables all its kernels
        raise InvalidValue(
            f"{key}.attention_backend", "local is for layers without Transformer Engine, which is installed"
        )
    usual = {"lr": 5.0e-6, "min_lr": 0.0, "use_distributed_optimizer": True}
    clip_grad = megatron.optimizer.get("clip_grad")
    if clip_grad is None:
        clip_grad = model.max_grad_norm or 0.0
    return msgspec.structs.replace(
        megatron,
        forwarded=_fit_arguments(key, "", megatron.forwarded),
        optimizer=_fit_arguments(key, "optimizer", {**usual, **megatron.optimizer, "clip_grad": clip_grad}),
        distributed_data_parallel_config=_fit_arguments(
            key, "distributed_data_parallel_config", megatron.distributed_data_parallel_config
        ),
    )


def _unfit(key: str, model: ModelConfig) -> MegatronCfg:
    megatron = model.megatron_cfg
    if megatron.optimizer.get("clip_grad") != (model.max_grad_norm or 0.0):
        return megatron
    optimizer = {name: value for name, value in megatron.optimizer.items() if name != "clip_grad"}
    return msgspec.structs.replace(megatron, optimizer=optimizer)


def _fit_arguments(prefix: str, section: str, settings: dict[str, Any]) -> dict[str, Any]:
    argument_types, prefix = list_arguments(section), f"{prefix}.{section}".rstrip(".")
    fitted, problems = {}, ProblemCollector()
    for name, value in settings.items():
        key = f"{prefix}.{name}"
        with problems.collected():
            if name in RESERVED[section]:
                raise InvalidValue(key, f"cannot be set here: {RESERVED[section][name]}")
            if argument_types and name not in argument_types:
                siblings = {**_list_types(section), **list_defaults(section)}
                unknown, hint = describe_unknown_key(key, value, siblings), nearest(name, list(siblings))
                release = " ".join(filter(None, ("Megatron-Core", find_release())))
                raise InvalidValue(key, f"{release} has no such argument{hint}", unknown=unknown)
            fitted[name] = conform(value, argument_types[name], key) if argument_types else value
    problems.complain()
    return fitted


def _list_types(section: str) -> dict[str, Any]:
    """Return the keys of a section that the schema itself declares, with their defaults."""
    return {} if section else {field.encode_name: field.default for field in msgspec.structs.fields(MegatronCfg)}


DELAYED = "delayed"
"""The recipe of Megatron-Core that is not supported; it is its default for float8."""

_TOKENS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}
"""Divisor of the tokens that a kernel takes, by recipe. An unknown recipe gets the largest.

A weight's gradient is a product along tokens. NeMo-RL has the same divisors for packed rows.
"""
_CAPABILITIES = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Least compute capability of a GPU, by recipe."""


class LowPrecisionProducts(msgspec.Struct, frozen=True):
    """The matrix products that a section requests."""

    name: str
    """``fp8`` or ``fp4``, the argument of Megatron-Core."""
    format: str
    """Format of the numbers."""
    recipe: str
    """Choice of the scales."""
    has_section: bool
    """Whether a section of their own requests them, as in NeMo-RL, or arguments of Megatron-Core."""

    @property
    def key(self) -> str:
        """Key that requests them, under ``megatron_cfg``."""
        return f"{self.name}_cfg.enabled" if self.has_section else self.name

    @property
    def value(self) -> str:
        """Value of that key, as an error shows it."""
        return "true" if self.has_section else str(self.format)

    @property
    def recipe_key(self) -> str:
        """Key that chooses the scales, under ``megatron_cfg``."""
        return f"{self.name}_cfg.{self.name}_recipe" if self.has_section else f"{self.name}_recipe"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of Megatron-Core's ``TransformerConfig``. Weights stay in the precision of the model."""
        return {self.name: self.format, f"{self.name}_recipe": self.recipe, f"{self.name}_param": False}

    @property
    def token_divisor(self) -> int:
        """Divisor of the tokens that a rank multiplies at once."""
        return _TOKENS.get(self.recipe, max(_TOKENS.values()))

    @property
    def capability(self) -> tuple[int, int]:
        """Least compute capability of a GPU; (0, 0) if the recipe is the user's own."""
        return _CAPABILITIES.get(self.recipe, (0, 0))


def list_products(megatron: MegatronCfg) -> tuple[LowPrecisionProducts, ...]:
    """Return what a section requests; more than one is a mistake."""
    products = []
    if megatron.fp8_cfg is not None and megatron.fp8_cfg.enabled:
        products.append(LowPrecisionProducts("fp8", megatron.fp8_cfg.fp8, megatron.fp8_cfg.fp8_recipe, True))
    if megatron.fp4_cfg is not None and megatron.fp4_cfg.enabled:
        products.append(LowPrecisionProducts("fp4", megatron.fp4_cfg.fp4, megatron.fp4_cfg.fp4_recipe, True))
    arguments = megatron.forwarded
    for name, default in (("fp8", DELAYED), ("fp4", "nvfp4")):
        if arguments.get(name) is not None:
            products.append(
                LowPrecisionProducts(name, arguments[name], arguments.get(f"{name}_recipe") or default, False)
            )
    return tuple(products)
