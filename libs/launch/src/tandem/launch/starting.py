"""``coordinator init``: starting configurations from a few choices, each key with its purpose."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml  # type: ignore[import-untyped]

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError, DataError, ModelError, RunFolderError, nearest
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


Entry: TypeAlias = "tuple[Any, str] | dict[str, Entry]"
"""A value with its comment, or a section."""
_WIDTH = 110
_COMMENTS_AT = 44
"""Column of a section's comments, where its values leave room."""


def refuse_if_there(path: Path) -> None:
    """Raise `ConfigError` if the path exists."""
    if path.exists():
        raise _is_there(path)


def write_new_file(path: Path, text: str) -> None:
    """Write a new file. Raise `ConfigError` if it exists, `RunFolderError` if it cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _is_there(path) from None
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


def _is_there(path: Path) -> ConfigError:
    return ConfigError(f"{path} already exists, and is not overwritten: name another file")


def write_configurations(choices: UserChoices, properties: DataProperties, path: Path) -> dict[Path, str]:
    """Return the texts of configuration files, of which `path` is the last.

    A model from scratch gives no useful response to reinforce. SFT therefore comes first, with a file of its own.
    """
    if choices.algorithm not in ROLLS_OUT or choices.model != NEW:
        return {path: _write_configuration(choices, properties, path, None)}
    first = path.with_name(f"{path.stem}_sft.yaml")
    of_first = msgspec.structs.replace(choices, algorithm="sft", lora=False)
    keeps_all = choices.algorithm == "distillation"
    return {
        first: _write_configuration(of_first, properties, first, None, keeps_all=keeps_all),
        path: _write_configuration(choices, properties, path, first),
    }


def _write_configuration(
    choices: UserChoices, properties: DataProperties, path: Path, prerequisite: Path | None, *, keeps_all: bool = False
) -> str:
    """Return the text of a configuration file; a prerequisite, if given, makes its model."""
    source = f"the task {choices.task}" if choices.task else f"{choices.file}"
    head = [
        f"# {choices.algorithm.upper()} on {source}; written by `coordinator init`.",
        f"#   coordinator check {path}     finds what is wrong, and starts nothing",
        f"#   coordinator up {path}        trains",
        "# docs/configuration.md has every key; `coordinator check --resolved` prints all of them with their values.",
    ]
    model = f"{_run_folder(path)}/model" if choices.model == NEW else choices.model
    teacher = choices.teacher
    first: dict[str, Entry] = {}
    if prerequisite is not None:
        model = f"{_run_folder(prerequisite)}/checkpoints/latest/policy"
        if choices.algorithm == "distillation":  # an early SFT checkpoint learns from the last one
            teacher, model = model, f"{_run_folder(prerequisite)}/checkpoints/step_{_SAVE_PERIOD}/policy"
        first = {"prerequisite": (prerequisite.name, "what `up` runs first, once: it makes the model")}
    tree: dict[str, Entry] = {
        **first,
        "algorithm": (choices.algorithm, f"what the run does: {ALGORITHMS[choices.algorithm]}"),
        choices.algorithm: _write_algorithm(choices),
        **({"loss_fn": _LOSS} if choices.algorithm in ("grpo", "ppo") else {}),
        "policy": _write_policy(choices, properties, model, is_made_here=choices.model == NEW and prerequisite is None),
        **({"value": _VALUE} if choices.algorithm == "ppo" else {}),
        **({"teacher": _write_teacher(str(teacher))} if choices.algorithm == "distillation" else {}),
        "data": _write_data(choices, properties),
        **({"env": _write_env(choices)} if choices.algorithm in ROLLS_OUT else {}),
        "checkpointing": {
            "save_period": (_SAVE_PERIOD, "steps between checkpoints; the last step is always saved"),
            "keep_top_k": (None if keeps_all else 2, "checkpoints kept beside the newest: the best ones; null: all"),
        },
        "logger": {"log_dir": (_run_folder(path), "the run folder: journal, checkpoints, logs, report")},
        "cluster": {
            "gpus_per_node": (_count_gpus(choices), "GPUs to use; 0: everything runs on the CPU"),
        },
    }
    return "\n".join([*head, *_write_lines(tree, "")]) + "\n"


def _run_folder(path: Path) -> str:
    return f"results/{path.stem}"


_SAVE_PERIOD = 20
_LEARNING_RATES = {
    "grpo": (4e-4, 1e-6),
    "ppo": (4e-4, 1e-6),
    "distillation": (1e-3, 1e-5),
    "sft": (1e-3, 1e-5),
    "dpo": (1e-3, 1e-5),
    "rm": (1e-3, 1e-5),
}
"""Learning rates of algorithms, for small models from scratch and for others."""
_OF_ADAPTERS = 10
"""Learning rate of adapters as a multiple of that of all weights, for a model that is not from scratch."""
_VALUE: dict[str, Entry] = {
    "optimizer": {
        "name": ("torch.optim.AdamW", "optimizer of the value model, which is made like the policy"),
        "kwargs": ({"lr": 1e-3, "weight_decay": 0.01}, "its arguments: it may learn faster than the policy"),
    },
}
_LOSS: dict[str, Entry] = {
    "reference_policy_kl_penalty": (0.0, "how strongly the policy is held to the model it started from"),
}


def _write_teacher(model: str) -> dict[str, Entry]:
    return {"model_name": (model, "the model to learn from; its tokenizer must be the policy's")}


def _write_algorithm(choices: UserChoices) -> dict[str, Entry]:
    if choices.algorithm in ROLLS_OUT:
        sizes: dict[str, Entry] = {
            "num_prompts_per_step": (16, "problems of a step"),
            "num_generations_per_prompt": (8, "samples drawn for each; the policy learns which of them are better"),
        }
        if choices.algorithm == "distillation":
            sizes = {
                "num_prompts_per_step": (128, "problems of a step"),
                "num_generations_per_prompt": (1, "samples drawn for each"),
                "topk_logits_k": (8, "number of the teacher's likeliest tokens whose probabilities are learned"),
            }
        return {
            **sizes,
            "max_num_steps": (100, "steps before the run ends; 0 only validates"),
            "val_period": (10, "steps between validations on the problems held out"),
            "val_at_start": (True, "validate the model before it has learned anything"),
            "max_val_samples": (256, "held-out problems used each time, at most"),
            "val_temperature": (None, "null samples validation as training does; 0 takes the likeliest tokens"),
            "seed": (42, "decides problems, their order, and every sample"),
        }
    unit = "pairs" if choices.algorithm in OF_PAIRS else "examples"
    entries: dict[str, Entry] = {
        "max_num_epochs": (20 if choices.model == NEW else 3, f"passes over the {unit}"),
        "max_num_steps": (300, "steps before the run ends, if the passes are more"),
        "val_period": (20, "steps between validations"),
        "val_batches": (1, "batches of each validation; -1: everything held out"),
        "val_global_batch_size": (64, f"{unit} of a validation batch"),
        "val_micro_batch_size": (8, f"{unit} in one forward pass of it"),
        "seed": (42, f"decides the order of the {unit}"),
    }
    if choices.algorithm == "dpo":
        entries["reference_policy_kl_penalty"] = (0.1, "the beta of DPO: how strongly the policy is held to its start")
    return entries


def _write_policy(
    choices: UserChoices, properties: DataProperties, model: str, *, is_made_here: bool
) -> dict[str, Entry]:
    length = compute_max_length(properties, choices)
    is_new = choices.model == NEW
    batch = 128 if choices.algorithm in ROLLS_OUT else 32
    rate = _LEARNING_RATES[choices.algorithm][0 if is_new else 1] * (_OF_ADAPTERS if choices.lora and not is_new else 1)
    policy: dict[str, Entry] = {
        "model_name": (model, "folder of the model, in Hugging Face's format, or its name on the Hub"),
    }
    if is_made_here:
        policy["new_model"] = _write_new_model(properties, length)
    policy |= {
        "precision": (
            "bfloat16" if ENGINE_KINDS[choices.engine].is_on_gpus else "float32",
            "type of weights and activations: float32 on a CPU, bfloat16 on GPUs",
        ),
        "max_total_sequence_length": (length, "tokens of prompt and response together"),
        "train_global_batch_size": (batch, "sequences of an optimizer step" if batch == 128 else "items of a step"),
        "train_micro_batch_size": (8, "of these in one forward and backward pass; less needs less memory"),
        "logprob_batch_size": (8, "sequences in one pass that only scores"),
        "max_grad_norm": (1.0, "gradients longer than this are scaled down to it"),
        "optimizer": {
            "name": ("torch.optim.AdamW", "any class of torch.optim"),
            "kwargs": (
                {"lr": rate, "weight_decay": 0.01},
                "its arguments; try other learning rates first",
            ),
        },
    }
    if choices.lora:
        policy["dtensor_cfg"] = {
            "lora_cfg": {
                "enabled": (True, "train only adapters; `coordinator merge` merges them into a plain model"),
                "dim": (16, "their rank"),
                "alpha": (32, "what they add is scaled by this over their rank"),
            }
        }
    if choices.algorithm == "rm":
        kind = {"enabled": True, "reward_model_type": "bradley_terry"}
        policy["reward_model_cfg"] = (kind, "its output is one score, higher for the better response")
    if choices.algorithm in ROLLS_OUT:
        policy["generation"] = _write_generation(choices, length)
    return policy


def _write_generation(choices: UserChoices, length: int) -> dict[str, Entry]:
    engine_sections: dict[str, Entry] = {
        "transformers_cfg": {"num_slots": (64, "sequences that it decodes at once")},
        "vllm_cfg": {"gpu_memory_utilization": (0.5, "share of a GPU that vLLM may take")},
    }
    section = ENGINE_KINDS[choices.engine].section
    return {
        "backend": (choices.engine, "the engine that samples: transformers (embedded) or vllm"),
        "max_new_tokens": (max(16, length // 2), "tokens of a response, at most"),
        "temperature": (1.0, "sampling temperature; below 1 samples are more alike, and less is learned from them"),
        section: engine_sections[section],
    }


def _write_new_model(properties: DataProperties, length: int) -> dict[str, Entry]:
    return {
        "characters": (properties.characters, "characters of its tokenizer: each is a token"),
        "config": (
            {
                "model_type": "qwen3",
                "hidden_size": 128,
                "intermediate_size": 384,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "tie_word_embeddings": True,
                "max_position_embeddings": length,
            },
            "made from scratch where there is no such folder yet",
        ),
    }


def _write_data(choices: UserChoices, properties: DataProperties) -> dict[str, Entry]:
    data: dict[str, Entry]
    if choices.task is not None:
        data = {
            "dataset_name": ("reasoning_gym", "problems are made by a task of reasoning-gym"),
            "task": (choices.task, "name of the task"),
            "task_params": ({}, "its parameters, such as how long or how hard"),
            "num_train": (1000 if choices.task == "spell_backward" else 500, "problems to train on"),
        }
    else:
        is_of_pairs = choices.algorithm in OF_PAIRS
        data = {
            "dataset_name": ("PreferenceDataset" if is_of_pairs else "jsonl", "rows of a local file, JSONL or CSV"),
            "train_data_path": (choices.file, "the file; relative to where the command is run"),
            **{key: (name, _FIELDS[key]) for key, name in properties.fields.items()},
        }
    data["num_validation"] = (properties.num_held_out, "held out: validated on, and never trained on")
    if choices.algorithm not in OF_PAIRS or choices.task is not None:
        data["prompt_template"] = ("{question}", "what the user says to the model")
    if choices.algorithm == "sft" or (choices.algorithm in OF_PAIRS and choices.task is not None):
        data["solution_template"] = (_SOLUTION[choices.algorithm], "what the model should answer")
    if choices.algorithm in OF_PAIRS and choices.task is not None:
        data["rejected_template"] = ("tandem.coordinator.data.worked:wrong_number", "what writes the worse solution")
    return data


_SOLUTION = {"sft": "{answer}", "dpo": " = {answer}", "rm": " = {answer}"}
_FIELDS = {
    "input_key": "field that holds the question",
    "output_key": "field that holds the reference answer",
    "prompt_key": "field that holds the prompt",
    "chosen_key": "field that holds the better response",
    "rejected_key": "field that holds the worse response",
}


def _write_env(choices: UserChoices) -> dict[str, Entry]:
    if choices.task is not None:
        return {
            "reasoning_gym": {
                "kwargs": (
                    {"answer_after": None, "partial_credit": True},
                    'answer_after: "Answer:" scores what follows it; null the whole response',
                )
            }
        }
    return {choices.environment: {"num_workers": (1, "processes that score; a class of your own may take its place")}}


def _count_gpus(choices: UserChoices) -> int:
    return int(ENGINE_KINDS[choices.engine].is_on_gpus)


def _write_lines(tree: Mapping[str, Entry], indent: str) -> Iterator[str]:
    for key, entry in tree.items():
        if isinstance(entry, dict):
            if not indent:
                yield ""
            yield f"{indent}{key}:"
            yield from _write_lines(entry, f"{indent}  ")
            continue
        value, comment = entry
        if isinstance(value, dict) and len(value) > 2:
            yield f"{indent}{key}: # {comment}"
            yield from (f"{indent}  {name}: {_write_scalar(inner)}" for name, inner in value.items())
            continue
        text = f"{indent}{key}: {_write_scalar(value)}"
        if len(text) + len(comment) < _WIDTH:
            yield f"{text:<{_COMMENTS_AT}} # {comment}"
        else:
            yield from (f"{indent}# {comment}", text)


def _write_scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and 0 < value < 1e-2:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):.1f}e{int(exponent)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_write_scalar(inner)}" for key, inner in value.items()) + "}"
    is_plain = not isinstance(value, str) or re.fullmatch(r"[A-Za-z][\w./-]*", value)
    style = None if is_plain else '"'
    text: str = yaml.safe_dump(value, default_style=style, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
