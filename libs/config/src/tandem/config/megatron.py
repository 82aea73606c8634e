"""Complete the arguments for Megatron-Core, and check them against its own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.common.distribution import install_command
from tandem.common.errors import nearest
from tandem.config.conform import conform, describe_unknown_key
from tandem.config.installed import megatron_arguments
from tandem.config.installed.sources import find_package
from tandem.config.low_precision import list_products
from tandem.config.problem import InvalidValue, ProblemCollector
from tandem.config.schema import MODELS, Config, MegatronCfg, ModelConfig


def fit_megatron(config: Config, *, to_run: bool) -> Config:
    """Return the configuration with Megatron-Core's arguments converted to their types, where it is enabled.

    Raises `InvalidValue` for an unknown argument. Without Megatron-Core, names and types are left unchecked.
    """
    return _change_each_model(config, lambda key, model: _fit(key, model, to_run=to_run))


def find_missing_megatron(config: Config) -> Iterator[InvalidValue]:
    """Yield a problem for each model that Megatron-Core trains where it is not installed, or cannot train."""
    for name in MODELS:
        model: ModelConfig | None = getattr(config, name)
        if model is not None and model.megatron_cfg.enabled and not megatron_arguments.is_installed():
            text = f"true, but Megatron-Core is not installed: {install_command('megatron')}"
            yield InvalidValue(f"{name}.megatron_cfg.enabled", text, is_of_machine=True)
        elif (
            model is not None
            and model.megatron_cfg.enabled
            and (obstacle := megatron_arguments.find_obstacle()) is not None
        ):
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
    argument_types, prefix = megatron_arguments.list_arguments(section), f"{prefix}.{section}".rstrip(".")
    fitted, problems = {}, ProblemCollector()
    for name, value in settings.items():
        key = f"{prefix}.{name}"
        with problems.collected():
            if name in megatron_arguments.RESERVED[section]:
                raise InvalidValue(key, f"cannot be set here: {megatron_arguments.RESERVED[section][name]}")
            if argument_types and name not in argument_types:
                siblings = {**_list_types(section), **megatron_arguments.list_defaults(section)}
                unknown, hint = describe_unknown_key(key, value, siblings), nearest(name, list(siblings))
                release = " ".join(filter(None, ("Megatron-Core", megatron_arguments.find_release())))
                raise InvalidValue(key, f"{release} has no such argument{hint}", unknown=unknown)
            fitted[name] = conform(value, argument_types[name], key) if argument_types else value
    problems.complain()
    return fitted


def _list_types(section: str) -> dict[str, Any]:
    """Return the keys of a section that the schema itself declares, with their defaults."""
    return {} if section else {field.encode_name: field.default for field in msgspec.structs.fields(MegatronCfg)}
