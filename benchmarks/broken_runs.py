"""Small real runs that are each broken in one way, and some that are well, to measure `coordinator diagnose` by."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.smoke import sized
from tests.harness.runs.running import coordinator, merged

NUM_STEPS = 24
NUM_SFT_STEPS = sized(220, 20)
ENVIRONMENT = '''
import time
import zlib

from tandem.rollout.environments import Score


class Sums:
    """The answer is worth one; `how` says what is wrong with the reward, `sleep_s` how long a score takes."""

    def __init__(self, how="right", sleep_s=0.0, sleep_after=0):
        self.how, self.sleep_s, self.sleep_after, self.scored = how, sleep_s, sleep_after, 0

    def score(self, problem, response):
        self.scored += 1
        if self.sleep_s and self.scored > self.sleep_after:
            time.sleep(self.sleep_s)
        correct = response.strip().removeprefix("=").strip() == problem.answer
        if self.how == "raises" and zlib.crc32(response.encode()) % 3 == 0:
            raise ValueError("no number")
        reward = {
            "inverted": float(not correct),
            "constant": 0.5,
            "length": len(response) / 16,
            "leaks": float("1" in response),
            "strict": float(response == f"<answer>{problem.answer}</answer>"),
        }.get(self.how, float(correct))
        return Score(reward=reward, correct=correct)
'''
_COMMON: dict[str, Any] = {
    "policy": {
        "precision": "float32",
        "max_total_sequence_length": 40,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 4.0e-4, "betas": [0.9, 0.95]}},
    },
    "checkpointing": {"enabled": False},
    "logger": {"log_dir": "run", "tensorboard_enabled": False, "page": "off"},
    "cluster": {"threads_per_process": 1},
}
_DATA: dict[str, Any] = {
    "dataset_name": "jsonl",
    "train_data_path": "../sums.jsonl",
    "num_train": 540,
    "num_validation": 100,
    "prompt_template": "{question}",
    "solution_template": " = {answer}",
}
START = merged(
    _COMMON,
    {
        "algorithm": "sft",
        "sft": {
            "max_num_epochs": 100,
            "max_num_steps": NUM_SFT_STEPS,
            "val_period": 0,
            "val_at_start": False,
            "val_global_batch_size": 64,
            "val_micro_batch_size": 64,
        },
        "policy": {
            "model_name": "model",
            "new_model": {
                "characters": "0123456789+-= ",
                "config": {
                    "model_type": "qwen3",
                    "hidden_size": 64,
                    "intermediate_size": 192,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "tie_word_embeddings": True,
                    "max_position_embeddings": 64,
                },
            },
            "train_global_batch_size": 32,
            "train_micro_batch_size": 32,
            "optimizer": {"kwargs": {"lr": 3.0e-3}},
        },
        "data": _DATA,
        "checkpointing": {"enabled": True, "save_period": NUM_SFT_STEPS},
    },
)
"""What all begin with: a model that answers about a third of the sums."""
GRPO = merged(
    _COMMON,
    {
        "algorithm": "grpo",
        "grpo": {
            "num_prompts_per_step": 16,
            "num_generations_per_prompt": 8,
            "max_num_steps": sized(NUM_STEPS, 6),
            "val_period": 8,
            "val_at_start": True,
            "max_val_samples": 100,
            "seed": 1,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "ratio_clip_max": 0.28},
        "policy": {
            "model_name": f"../start/run/checkpoints/step_{NUM_SFT_STEPS}/policy",
            "train_global_batch_size": 64,
            "train_micro_batch_size": 64,
            "logprob_batch_size": 128,
            "generation": {"max_new_tokens": 8, "transformers_cfg": {"num_slots": 128}},
        },
        "data": _DATA,
        "env": {"sums": {"class": "sums.Sums"}},
    },
)


class Case(NamedTuple):
    """A run, and the findings of which one must come first; a healthy one has none."""

    name: str
    expected: tuple[str, ...]
    over: dict[str, Any]
    base: dict[str, Any] = GRPO
    overwritten_by: str = ""
    """Folder of a model that overwrites the run's own halfway, before the run is resumed."""


def _env(**kwargs: Any) -> dict[str, Any]:
    return {"env": {"sums": {"kwargs": kwargs}}}


def _rate(rate: float) -> dict[str, Any]:
    return {"policy": {"optimizer": {"kwargs": {"lr": rate}}}}


def _steps(algorithm: str, number: int) -> dict[str, Any]:
    return {algorithm: {"max_num_steps": sized(number, 6)}}


_OFF_POLICY = {
    "grpo": {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 4}},
    "policy": {"generation": {"colocated": {"enabled": False}}},
}
_UNREWARDED = ("equal rewards", "no progress")
"""A wrong template and problems that are too hard look the same in a record; both findings say to look at both."""
SFT = merged(
    START,
    {
        "policy": {
            "model_name": GRPO["policy"]["model_name"],
            "new_model": None,
            "optimizer": {"kwargs": {"lr": 1e-3}},
        },
        "checkpointing": {"enabled": False},
        "sft": {"max_num_steps": sized(60, 6), "val_period": 20, "val_at_start": True},
    },
)
BROKEN = (
    Case("learning rate 100 times too high", ("learning rate too large",), _rate(4e-2)),
    Case("max_new_tokens too short", ("truncated responses",), {"policy": {"generation": {"max_new_tokens": 2}}}),
    Case("reward constant", ("equal rewards",), _env(how="constant")),
    Case("learning rate 100 times too high, SFT", ("learning rate too large",), _rate(3e-1), SFT),
    Case("learning rate 0", ("no learning rate",), _rate(0.0)),
    Case("learning rate 1e-7 of what it was", ("learning rate too small", "unchanged weights"), _rate(4e-11)),
    Case("learning rate a thousandth of what it was", ("learning rate too small",), _rate(4e-7)),
    Case("clip range of 0", ("clip range too narrow",), {"loss_fn": {"ratio_clip_min": 0.0, "ratio_clip_max": 0.0}}),
    Case("KL weight of 1000", ("KL penalty too large",), {"loss_fn": {"reference_policy_kl_penalty": 1000.0}}),
    Case("wrong prompt template", _UNREWARDED, {"data": {"prompt_template": "= 1 = 2 = {question} = 3 = 4 "}}),
    Case("stop string too early", ("responses stop too early",), {"policy": {"generation": {"stop_strings": ["="]}}}),
    Case("reward inverted", ("reward against the answers",), _env(how="inverted")),
    Case(
        "reward for length",
        ("reward without accuracy", "growing responses"),
        merged(_env(how="length"), {"policy": {"generation": {"max_new_tokens": 16}}}),
    ),
    Case("reward that one answer gets", ("one answer to everything", "reward without accuracy"), _env(how="leaks")),
    Case("right answers in a form that is not rewarded", ("right answers unrewarded",), _env(how="strict")),
    Case(
        "problems too hard",
        _UNREWARDED,
        {"data": {"train_data_path": "../hard.jsonl"}, "policy": {"generation": {"max_new_tokens": 16}}},
    ),
    Case(
        "problems too easy",
        ("equal rewards", "groups without spread"),
        {
            "data": {"train_data_path": "../easy.jsonl", "num_validation": 8, "num_train": 32},
            "policy": {"model_name": f"../easy_start/run/checkpoints/step_{NUM_SFT_STEPS}/policy"},
        },
    ),
    Case(
        "stale weights",
        ("stale samples",),
        merged(merged(_OFF_POLICY, {"grpo": {"async_grpo": {"max_trajectory_age_steps": 8}}}), _rate(1.2e-3)),
    ),
    Case("tokenizer of another model", ("another tokenizer",), {"policy": {"tokenizer": {"name": "../tokenizer"}}}),
    Case("slow environment", ("slow environment",), merged(_env(sleep_s=0.02), _steps("grpo", 8))),
    Case(
        "environment that raises",
        ("failing environment",),
        merged(_env(how="raises"), {"env": {"sums": {"on_error": "zero"}}}),
    ),
    Case("environment that becomes slow", ("slow environment", "became slow"), _env(sleep_s=0.005, sleep_after=1500)),
    Case("samples that hardly differ", ("low temperature",), {"policy": {"generation": {"temperature": 0.01}}}),
    Case("engine that samples otherwise", ("engine and trainer disagree",), {"policy": {"generation": {"top_p": 0.3}}}),
    Case(
        "groups of one sample",
        ("groups without spread",),
        {"grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 1, "use_leave_one_out_baseline": False}},
    ),
    Case("few problems", ("repeated problems",), {"data": {"num_train": 8}}),
    Case(
        "dropout of nearly everything",
        ("dropout",),
        merged(
            _rate(1e-3),
            {
                "policy": {
                    "train_global_batch_size": 128,
                    "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 16, "dropout": 0.9}},
                }
            },
        ),
    ),
    Case(
        "wrong reference",
        ("wrong reference",),
        {"loss_fn": {"reference_policy_kl_penalty": 0.05}, "checkpointing": {"enabled": True}},
        overwritten_by=f"easy_start/run/checkpoints/step_{NUM_SFT_STEPS}/policy",
    ),
    Case(
        "prompts with the answer",
        ("leaked answer",),
        {
            "data": {"train_data_path": "../leaking.jsonl"},
            "policy": {"model_name": f"../leaking_start/run/checkpoints/step_{NUM_SFT_STEPS}/policy"},
        },
    ),
    Case("SFT over few examples", ("overfitting",), merged(_steps("sft", 120), {"data": {"num_train": 32}}), SFT),
)
HEALTHY = (
    Case("GRPO", (), {}),
    Case("GRPO, another seed, twice the rate", (), merged(_rate(8e-4), {"grpo": {"seed": 2}})),
    Case(
        "GRPO, asynchronous",
        (),
        merged(
            _OFF_POLICY,
            {
                "grpo": {"async_grpo": {"max_trajectory_age_steps": 1}},
                "loss_fn": {"use_importance_sampling_correction": True},
            },
        ),
    ),
    Case("GRPO with a KL penalty", (), {"loss_fn": {"reference_policy_kl_penalty": 0.01}, "grpo": {"seed": 3}}),
    Case("SFT", (), {}, SFT),
)


def _rows(name: str, rows: Sequence[dict[str, str]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def prepare() -> None:
    """Write the data, and train the models that runs begin with, in the working directory."""

    def sums(firsts: Sequence[int], others: Sequence[int]) -> list[dict[str, str]]:
        made = [
            {"input": f"{a} {s} {b} {t} {c}", "output": str(a + (b if s == "+" else -b) + (c if t == "+" else -c))}
            for a, b, c, s, t in itertools.product(firsts, others, others, "+-", "+-")
        ]
        random.Random(1).shuffle(made)
        return made

    _rows("sums", sums(range(10), range(4))[:700])
    _rows("easy", sums(range(10), [0]))
    told = [
        {"input": f"{row['input']} = {row['output']}", "output": row["output"]} for row in sums(range(10), range(4))
    ]
    _rows("leaking", told[:700])
    _rows("hard", sums(range(100, 999, 90), range(101, 999, 97))[:700])
    run(Case("start", (), {}, START), "start")


def prepare_others() -> None:
    """Train the models that a few cases begin with."""
    easy = {"train_data_path": "../easy.jsonl", "num_train": 32, "num_validation": 8}
    run(Case("easy", (), {"data": easy, "sft": {"max_num_epochs": 1000}}, START), "easy_start")
    leaking = {"train_data_path": "../leaking.jsonl"}
    run(Case("leaking", (), {"data": leaking}, START), "leaking_start")
    tokenizer = Path("tokenizer")
    shutil.copytree(
        Path("start") / "run" / "checkpoints" / f"step_{NUM_SFT_STEPS}" / "policy", tokenizer, dirs_exist_ok=True
    )
    described = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    digits = [c for c in "0123456789" if c in vocabulary]
    vocabulary.update(zip(digits, [vocabulary[c] for c in reversed(digits)], strict=True))
    (tokenizer / "tokenizer.json").write_text(json.dumps(described))


def run(case: Case, folder: str) -> Path:
    """Run a case in a folder of its own; return the run's folder."""
    place = Path(folder)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    config = merged(case.base, case.over)
    config["logger"] = config["logger"] | {"log_dir": str((place / "run").resolve())}
    (place / "sums.py").write_text(ENVIRONMENT)
    config = _resolved(config, place)
    if case.overwritten_by:
        model, num_steps = place / "model", config["grpo"]["max_num_steps"]
        shutil.copytree(config["policy"]["model_name"], model)
        config["policy"]["model_name"] = str(model.resolve())
        config["grpo"]["max_num_steps"] = config["checkpointing"]["save_period"] = num_steps // 2
        _up(place, config)
        shutil.copytree(case.overwritten_by, model, dirs_exist_ok=True)
        config["grpo"]["max_num_steps"] = num_steps
        _up(place, config, "--resume")
    else:
        _up(place, config)
    return place / "run"


def _up(place: Path, config: dict[str, Any], *arguments: str) -> None:
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    done = coordinator("up", place / "config.yaml", *arguments)
    with (place / "output.txt").open("a") as output:
        output.write(done.stdout + done.stderr)


def _resolved(config: Any, place: Path) -> Any:
    if isinstance(config, dict):
        return {key: _resolved(value, place) for key, value in config.items()}
    return str((place / config).resolve()) if isinstance(config, str) and config.startswith("../") else config
