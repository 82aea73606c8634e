"""Rules for environments that score responses about images: the functions and their arguments exist"""

from __future__ import annotations

import re

import msgspec

from tandem.common.errors import listed, nearest
from tandem.config.checks.rule import Rule, restrict_to_rollouts
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config
from tandem.config.schema.image_rewards import ARGUMENTS, IMAGE_ENVIRONMENTS, RewardFunctionConfig


def check_functions_score(config: Config) -> None:
    """Check the functions of the environments for images that the run uses."""
    for name in config.environments:
        entry = config.env.get(name)
        if entry is not None and name in IMAGE_ENVIRONMENTS and not entry.is_custom and entry.judge is None:
            read_reward_functions(name, entry.reward_functions)


def read_reward_functions(environment: str, entries: tuple[dict[str, object], ...]) -> tuple[RewardFunctionConfig, ...]:
    """Return the functions of an environment. Raises `InvalidValue`."""
    key = f"env.{environment}.reward_functions"
    if not entries:
        raise InvalidValue(key, "required, such as [{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]")
    functions = tuple(_read_function(f"{key}[{index}]", entry) for index, entry in enumerate(entries))
    if not sum(each.weight for each in functions) > 0.0:
        raise InvalidValue(key, "no weight is greater than 0")
    names = [each.name for each in functions]
    if len({*names}) < len(names):
        raise InvalidValue(key, f"{shown(names)} has a function twice")
    return functions


def _read_function(key: str, entry: dict[str, object]) -> RewardFunctionConfig:
    name = entry.get("name")
    if name not in ARGUMENTS:
        raise InvalidValue(
            f"{key}.name", f"{shown(name)} is not built{nearest(str(name), ARGUMENTS)}: {listed([*ARGUMENTS])}"
        )
    parameters, kwargs = ARGUMENTS[str(name)], entry.get("kwargs")
    arguments: dict[str, object] = kwargs if isinstance(kwargs, dict) else {}
    for argument in arguments:
        if argument not in parameters:
            raise InvalidValue(f"{key}.kwargs.{argument}", f"{name} has no such argument, but {listed([*parameters])}")
        if argument.endswith("tag") and not re.fullmatch(r"[\w-]+", str(arguments[argument])):
            raise InvalidValue(
                f"{key}.kwargs.{argument}", f"{shown(arguments[argument])} is not a tag: use letters, digits and '_'"
            )
    try:
        return msgspec.convert(entry, RewardFunctionConfig)
    except msgspec.ValidationError as error:
        raise InvalidValue(key, str(error)[0].lower() + str(error)[1:]) from None


RULES: tuple[Rule, ...] = restrict_to_rollouts(check_functions_score)
