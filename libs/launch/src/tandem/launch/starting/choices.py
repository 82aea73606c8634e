"""The choices for a starting configuration, and what follows from the data and the model they name."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError, DataError, ModelError, nearest
from tandem.common.values import text_of
from tandem.config import build_config
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.config.installed.sources import find_package
from tandem.config.models import hub
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.split import share_held_out

ALGORITHMS = {
    "grpo": "learn from rewards for the model's own samples",
    "sft": "learn from worked solutions",
    "dpo": "learn from better and worse responses",
    "ppo": "learn from rewards, with a value model beside the policy",
    "rm": "train a reward model on better and worse responses",
    "distillation": "learn a teacher's probabilities on the model's own samples",
}
ROLLS_OUT = ("grpo", "ppo", "distillation")
"""Algorithms that sample; a model from scratch gets SFT before them."""
OF_PAIRS = ("dpo", "rm")
"""Algorithms that compare two responses."""
TASKS = {
    "chain_sum": "sums of a few numbers",
    "products": "products of two numbers",
    "gcd": "greatest common divisors",
    "spell_backward": "words spelt backward",
}
"""Tasks of reasoning-gym that are offered; any other of its names can be given."""
OF_NUMBERS = ("chain_sum", "products", "gcd")
"""Tasks for which worse solutions can be written."""
ENGINES = {
    kind.name: f"{kind.summary}, and {install_command(kind.extra)}" if kind.extra else kind.summary
    for kind in ENGINE_KINDS.values()
}
ENVIRONMENTS = {
    "exact_match": "the response is the answer, letter for letter",
    "math": "the response holds an expression that equals the answer",
}
NEW = "new"
"""Choice of a model that is made from scratch."""
_NAMES = {
    "input_key": ("question", "problem", "prompt", "instruction", "input", "query"),
    "output_key": ("answer", "expected_answer", "output", "solution", "response", "completion", "target"),
    "prompt_key": ("prompt", "question", "instruction", "input"),
    "chosen_key": ("chosen", "chosen_response", "better"),
    "rejected_key": ("rejected", "rejected_response", "worse"),
}
"""Usual names of a file's fields, by the key that names them."""
_NUM_LOOKED_AT = 500
_ROOM = 64
"""Tokens of a response beyond those of the reference answer."""


class UserChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the user."""

    algorithm: str
    task: str | None
    """Task of reasoning-gym; None if problems come from a file."""
    file: str | None
    model: str
    """Folder, name on the Hub, or `NEW`."""
    engine: str
    environment: str
    """Environment for problems from a file."""
    teacher: str | None = None
    """Folder of the model to distil; None if SFT makes it."""
    lora: bool = False
    """Whether only low-rank adapters are trained."""


class DataProperties(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of the data."""

    fields: Mapping[str, str]
    """Keys of ``data`` that name fields of the file."""
    num_held_out: int
    characters: str
    """All characters of the data, for a new tokenizer."""
    longest: int
    """Characters of the longest prompt with its solution."""


def check_choices(choices: UserChoices) -> None:
    """Raise `ConfigError` for choices that do not exist, or do not go together."""
    check_name("algorithm", choices.algorithm, ALGORITHMS)
    check_name("engine", choices.engine, ENGINES)
    check_name("environment", choices.environment, ENVIRONMENTS)
    if choices.algorithm in OF_PAIRS and choices.task is not None and choices.task not in OF_NUMBERS:
        raise ConfigError(
            f"--task {choices.task}: {choices.algorithm} needs worse solutions too, which can be made for "
            f"{', '.join(OF_NUMBERS)}; --from FILE takes written ones"
        )
    check_model(choices.model)
    _check_teacher(choices)
    if choices.lora and choices.algorithm == "rm":
        raise ConfigError("--lora: a reward model trains an output of its own, which adapters leave as it is")
    if choices.lora and choices.model == NEW and choices.algorithm not in ROLLS_OUT:
        raise ConfigError("--lora: adapters need a trained model: name one by --model FOLDER")


def _check_teacher(choices: UserChoices) -> None:
    """Raise `ConfigError` for a teacher without distillation, and for distillation without a teacher."""
    teacher = choices.teacher
    if choices.algorithm != "distillation":
        if teacher is not None:
            raise ConfigError(f"--teacher {teacher}: {choices.algorithm} has no teacher, distillation has one")
        return
    if choices.model == NEW and teacher is not None:
        raise ConfigError(f"--teacher {teacher}: a new model has a tokenizer of its own: give --model FOLDER as well")
    if choices.model != NEW and teacher is None:
        raise ConfigError("--teacher: distillation needs one: the folder of a model with the same tokenizer")
    if teacher is not None and (problem := _explain_no_model(teacher)) is not None:
        raise ConfigError(f"--teacher {teacher}: {problem}")


def check_name(option: str, value: str, known_names: Iterable[str]) -> None:
    """Raise `ConfigError` for an unknown name."""
    if value not in (names := [*known_names]):
        raise ConfigError(f"--{option}: {value!r} is not one of {', '.join(names)}{nearest(value, names)}")


def check_model(model: str) -> None:
    """Raise `ConfigError` for a model that is neither a folder nor a name on the Hub."""
    if model == NEW:
        return
    problem = _explain_no_model(model)
    if problem is not None:
        folder = Path(model)
        beside = [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(
            f"--model {model}: {problem}: give a Hugging Face folder, a name on the Hub (org/name), or {NEW!r} for a "
            f"small one from scratch{nearest(folder.name, beside)}"
        )


def _explain_no_model(model: str) -> str | None:
    """Return why a model's configuration cannot be read; None if it can."""
    try:
        folder = _fetch_description(model)
    except ModelError as error:
        return f"there is no such folder, and {error}"
    return None if (folder / "config.json").is_file() else "there is no config.json in it"


def _fetch_description(model: str) -> Path:
    """Return the folder with a model's configuration; here, a name on the Hub has a slash."""
    return hub.fetch_described(model) if "/" in model else Path(model)


def check_source(algorithm: str, source: str) -> None:
    """Raise `TandemError` for an unusable answer to the question for a task or a file."""
    task, file = (None, source) if is_file(source) else (source, None)
    choices = UserChoices(
        algorithm=algorithm, task=task, file=file, model=NEW, engine="transformers", environment="exact_match"
    )
    check_choices(choices)
    look_at(choices)


def is_file(source: str) -> bool:
    """Return whether the user's source of problems is a file rather than a task."""
    return "." in source or Path(source).is_file()


def is_installed(engine: str) -> bool:
    """Return whether an engine's package is installed."""
    return find_package(engine) is not None


def look_at(choices: UserChoices) -> DataProperties:
    """Read the data. Raise `ConfigError` or `DataError` if they cannot be used."""
    if choices.task is not None:
        return _describe_task(choices.task)
    rows = sources.file_rows(str(choices.file))
    fields = _find_fields(choices, rows)
    num_held_out = share_held_out(len(rows))
    if len(rows) < 2:
        raise DataError(f"--from {choices.file}: one problem is too few: some are to be held out")
    texts = [[text_of(row[key]) for key in fields.values()] for _, row in rows]
    return _measure_texts(fields, num_held_out, texts)


def _describe_task(task: str) -> DataProperties:
    settings = {
        "algorithm": "grpo",
        "policy": {"model_name": "any"},
        "data": {"dataset_name": "reasoning_gym", "task": task},
    }
    problems = itertools.islice(sources.reasoning_gym(build_config(settings, "--task").data, 42), _NUM_LOOKED_AT)
    return _measure_texts({}, 64, [[text_of(problem.question), text_of(problem.answer)] for problem in problems])


def _measure_texts(fields: Mapping[str, str], num_held_out: int, texts: Iterable[Sequence[str]]) -> DataProperties:
    longest, characters = 0, set(string.ascii_letters + string.digits + string.punctuation + " \n")
    for parts in texts:
        longest = max(longest, sum(map(len, parts)))
        characters.update(*parts)
    return DataProperties(
        fields=fields, num_held_out=num_held_out, characters="".join(sorted(characters)), longest=longest
    )


def _find_fields(choices: UserChoices, rows: sources.Rows) -> dict[str, str]:
    """Find the fields of a file by their usual names. Raise `DataError` if one is missing."""
    keys = (
        ("prompt_key", "chosen_key", "rejected_key") if choices.algorithm in OF_PAIRS else ("input_key", "output_key")
    )
    first_place, first = rows[0]
    names_by_key = {key: next((name for name in _NAMES[key] if name in first), None) for key in keys}
    missing = [key for key, name in names_by_key.items() if name is None]
    if missing:
        called = "; ".join(f"{key.removesuffix('_key')}: {', '.join(_NAMES[key])}" for key in missing)
        raise DataError(
            f"{first_place} has the fields {', '.join(first)}, and none of them has a usual name ({called})"
        )
    fields = {key: str(name) for key, name in names_by_key.items()}
    for place, row in rows:
        for key, name in fields.items():
            sources.field(place, row, key, name)
    return fields


def compute_max_length(properties: DataProperties, choices: UserChoices) -> int:
    """Return tokens enough for the longest prompt and its answer; a new tokenizer has a token a character."""
    if choices.model == NEW:
        return -(-(properties.longest + _ROOM) // 64) * 64
    model: Any = msgspec.json.decode((_fetch_description(choices.model) / "config.json").read_bytes())
    max_positions = model.get("max_position_embeddings")
    length = max(1024, -(-(properties.longest + _ROOM) // 64) * 64)
    return min(length, max_positions) if isinstance(max_positions, int) else length
