"""One GRPO step end to end, Tandem and TRL, on the same model, problems and machine.

The workload: a 3M-parameter Qwen3 in float32, 16 prompts of 8 samples, 24 new tokens each. Tandem runs through its
console command, four processes and all; TRL's GRPOTrainer runs in one. Both train on every sample once, with AdamW and
no KL penalty. With 500 characters, random weights hardly ever end a response early: both make as many tokens.

In turns, round after round, with the matrix products that such a step cannot do without (`matrix_products`), alone and
with all cores: what they take, over what a step takes, is the share of the bound that it reaches. Each prompt counts
once for all of its samples, and only responses need logits. Where TRL is not installed it is left out.

Then all of it again beside another program, which takes what it can get of a core.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from matrix_products import MatrixProducts, Products, capability, products_of, seen
from measure import Turns, keep_ratios, seconds_of
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

NUM_ROUNDS = sized(2, 1, long=5)
NUM_STEPS = sized(9, 4)
NUM_WARMUP = 2
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 16, 8, 24
NUM_PROMPT_TOKENS = 13
"""What a sum of four digits has."""
PRODUCTS = "matrix products"
AIMS = {"generation": 0.5, "policy_training": 0.7}
"""Of the bound, by part of a step."""
TIMES_TRL = {0: 2.0, 1: 1.0}
"""How many times as fast as TRL a step should be, by how many other programs want a core."""

CONFIG = {
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_SAMPLES,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "0123456789+-= " + "".join(map(chr, range(0x100, 0x2F0))),
            "config": {
                "model_type": "qwen3",
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_global_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "train_micro_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "generation": {"max_new_tokens": NUM_TOKENS, "transformers_cfg": {"num_slots": 128}},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-6}},
    },
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "task_params": {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        "num_train": 512,
        "num_validation": 16,
        "prompt_template": "{metadata[expression]}",
    },
    "checkpointing": {"enabled": False, "metric_name": "reward"},
    "logger": {"log_dir": "run", "tensorboard_enabled": False},
}


Times = dict[str, list[float]]


def tandem_step_seconds(folder: Path) -> Times:
    """Run Tandem; return the seconds of each step after the warm-up by part, as its journal has them."""
    from tandem.observe.run_folder.journal import read_journal

    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    command = [str(Path(sys.executable).parent / "coordinator"), "up", str(path), "--restart"]
    subprocess.run(command, check=True, cwd=folder, timeout=300, capture_output=True)
    with read_journal(folder / "run") as journal:
        steps = journal.steps()
    assert all(s.metrics["mean_generation_length"] > NUM_TOKENS - 4 for s in steps)
    measured = [step.seconds for step in steps if step.step > NUM_WARMUP]
    return {part: [seconds[part] for seconds in measured] for part in ("total", "generation", "policy_training")}


def products_of_a_step(folder: Path) -> dict[str, Products]:
    """Return the products of a step by part; there must be the model."""
    model = json.loads((folder / "model" / "config.json").read_bytes())
    samples, length = NUM_PROMPTS * NUM_SAMPLES, NUM_PROMPT_TOKENS + NUM_TOKENS
    training = products_of(
        model,
        rows=NUM_PROMPTS * NUM_PROMPT_TOKENS + samples * NUM_TOKENS,
        outputs=samples * NUM_TOKENS,
        sequences=samples,
        queries=NUM_TOKENS,
        keys=NUM_PROMPT_TOKENS + seen(NUM_TOKENS),
        trains=True,
    )
    generation = products_of(
        model,
        rows=NUM_PROMPTS * NUM_PROMPT_TOKENS,
        outputs=NUM_PROMPTS,
        sequences=NUM_PROMPTS,
        queries=NUM_PROMPT_TOKENS,
        keys=seen(NUM_PROMPT_TOKENS),
        trains=False,
    )
    for held in range(NUM_PROMPT_TOKENS + 1, length):
        generation += products_of(
            model, rows=samples, outputs=samples, sequences=samples, queries=1, keys=held, trains=False
        )
    return {"generation": generation, "policy_training": training}


class AlonePart:
    """The products of a part of a step: the seconds that they take, turn by turn."""

    def __init__(self, products: Products) -> None:
        self._products = MatrixProducts(products)
        self.seconds: list[float] = []
        self.num_operations = self._products.num_operations

    def turn(self) -> float:
        """Compute as often as a run has steps; return the median."""
        times = [seconds_of(self._products.run) for _ in range(NUM_STEPS)]
        self.seconds.append(statistics.median(times[NUM_WARMUP:]))
        return self.seconds[-1]


def trl_step_seconds(folder: Path) -> list[float]:
    """Run TRL's trainer on the model that Tandem made; return the seconds of each step after the warm-up."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    prompts = [{"prompt": f"{i % 10} + {i % 7} - {i % 5} + {i % 9}"} for i in range(NUM_STEPS * NUM_PROMPTS)]
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=NUM_TOKENS,
        max_steps=NUM_STEPS,
        beta=0.0,
        learning_rate=1.0e-6,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        callbacks=[Clock()],
    )
    trainer.train()
    return [b - a for a, b in zip(ends[NUM_WARMUP - 1 :], ends[NUM_WARMUP:], strict=False)]


@pytest.fixture
def all_cores() -> Iterator[None]:
    """All cores for what runs in this process, as a synchronous run of Tandem has them."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """Have so many other programs compute as fast as they can."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(program.kill)
        yield


@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("all_cores")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # what TRL uses of transformers is about to be renamed
@pytest.mark.parametrize(
    "num_others", [0, pytest.param(1, marks=pytest.mark.long(minutes=8))], ids=["alone", "beside another program"]
)
def test_a_step_beside_trl(benchmark: BenchmarkFixture, num_others: int, tmp_path: Path) -> None:
    runs: dict[str, list[Times]] = {"tandem": [], "trl": []}
    alone: dict[str, AlonePart] = {}

    def tandem() -> float:
        runs["tandem"].append(tandem_step_seconds(tmp_path))
        return statistics.median(runs["tandem"][-1]["total"])

    def trl() -> float:
        runs["trl"].append({"total": trl_step_seconds(tmp_path)})
        return statistics.median(runs["trl"][-1]["total"])

    def products() -> float:
        if not alone:
            alone.update({part: AlonePart(of) for part, of in products_of_a_step(tmp_path).items()})
        return sum(part.turn() for part in alone.values())

    # Tandem has the first turn: it makes the model.
    has_trl = importlib.util.find_spec("trl") is not None
    last = {"trl": trl} if has_trl else {PRODUCTS: products}
    turns = Turns(last | {"tandem": tandem, PRODUCTS: products})
    with busy_programs(num_others):
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS)

    medians = {way: statistics.median(times) for way, times in turns.seconds.items()}
    part_medians = {
        part: statistics.median(s for run in runs["tandem"] for s in run[part]) for part in runs["tandem"][0]
    }
    products_s = {part: statistics.median(of.seconds) for part, of in alone.items()}
    rates = {part: of.num_operations / products_s[part] for part, of in alone.items()}
    reached = {f"{way}, whole step": medians[PRODUCTS] / medians[way] for way in medians if way != PRODUCTS}
    reached |= {f"tandem, {part}": products_s[part] / part_medians[part] for part in alone}
    benchmark.extra_info.update(
        {
            "load average of the machine": os.getloadavg(),
            "threads": torch.get_num_threads(),
            "vectors": capability(),
            "median step seconds": medians,
            "tandem: median seconds by part": part_medians,
            f"{PRODUCTS}: seconds": products_s,
            f"{PRODUCTS}: operations a second": rates,
            f"share of the bound, {PRODUCTS}": reached,
            "seconds of every step": runs,
        }
    )
    shown = ", ".join(f"{way} {median:.3f} s" for way, median in medians.items())
    print(f"\nmedian step: {shown}; of tandem's: {part_medians}")
    if has_trl:
        ratio = medians["trl"] / medians["tandem"]
        benchmark.extra_info["trl over tandem"] = ratio
        keep_ratios(benchmark, "times as fast as trl", {"tandem": ratio}, aim=TIMES_TRL[num_others])
        print(f"{ratio:.2f} times as fast as TRL")
    else:
        benchmark.extra_info["left out"] = {"trl": "pip install -e '.[bench]' to compare with TRL"}
    whole = {way: share for way, share in reached.items() if way.endswith("whole step")}
    keep_ratios(benchmark, "share of the bound", whole)
    for part, aim in AIMS.items():
        keep_ratios(benchmark, f"share of the bound, {part}", {"tandem": reached[f"tandem, {part}"]}, aim=aim)
    print(f"of the bound ({capability()}, {torch.get_num_threads()} threads): {reached}")
