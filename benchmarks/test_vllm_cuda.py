"""vLLM on one GPU: what new weights cost, what sleep gives back, tokens a second, and what a colocated step takes.

A trainer in another process holds a Qwen3 of random bfloat16 weights, from 0.6B to 8B; a real vLLM engine in this one
opens its memory through CUDA IPC and copies out of it, in place. Beside it, in turns: vLLM's own `load_weights` of as
many tensors that lie on the device already, and a plain copy on the device. Checked after every refit: the digest of
each tensor against the trainer's. The colocated steps are those of ``coordinator up``, as its journal has them.

vLLM reads its environment once, so this file is run alone: ``pytest benchmarks/test_vllm_cuda.py -s``. Without a GPU it
skips. ``BENCHMARK_DEVICE=cpu`` runs all of it with a tiny model in shared memory, to try the code.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import yaml
from measure import Turns, keep_ratios, report, seconds_of

from tandem.rollout.engines.vllm import insides

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
if "torch" in sys.modules and multiprocessing.current_process().name == "MainProcess":  # the trainer may have it
    pytest.skip("something has imported torch before: run this file alone", allow_module_level=True)
insides.prepare_environment(num_threads=1)

import torch  # noqa: E402
import transformers  # noqa: E402
from processes import Asked, EndpointService, Remote, config_json, started  # noqa: E402

from tandem.common.messages import SamplingParameters  # noqa: E402
from tandem.config.schema.generation import VllmCfg  # noqa: E402
from tandem.launch.service import ServiceContext  # noqa: E402
from tandem.refit import layout  # noqa: E402
from tandem.refit.digests.task import digest_layout  # noqa: E402
from tandem.refit.planner import plan  # noqa: E402
from tandem.refit.weight_client import WeightClient  # noqa: E402
from tandem.rollout.engine import SequenceRequest  # noqa: E402
from tandem.rollout.engines.vllm.engine import VllmEngine  # noqa: E402

DEVICE = os.environ.get("BENCHMARK_DEVICE", "cuda")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU here"),
]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
NUM_ROUNDS = 7
NUM_PROMPTS, NUM_NEW = (64, 256) if DEVICE == "cuda" else (8, 16)
MAX_LENGTH = 512 if DEVICE == "cuda" else 64
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Those of the model cards; the two smaller have tied embeddings."""
if DEVICE == "cpu":
    QWEN3 |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
    SIZES = {
        "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    }
COLOCATED = [size for size in SIZES if size in ("tiny", "0.6B", "1.7B", "4B")]
"""What fits one GPU of 80 GB: weights, gradients and AdamW's two moments beside an engine of the same weights."""


def settings_of(size: str) -> dict[str, Any]:
    return {**QWEN3, **SIZES[size], "tie_word_embeddings": size in ("tiny", "0.6B", "1.7B")}


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Trainer(EndpointService):
    """Holds a model as transformers has it, in memory that engines can open."""

    def __init__(self, context: ServiceContext, folder: str, size: str) -> None:
        from tandem.trainer.exposed_weights import share, weights_of

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**settings_of(size))
        with torch.device(DEVICE):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        model.config.save_pretrained(folder)
        self.model = model.requires_grad_(False)
        share(dict(model.named_parameters()))
        self.weights = weights_of(dict(model.named_parameters()))
        self.weight_client = WeightClient(context, self.weights)

    def layout(self) -> bytes:
        return layout.encode(self.weights.layout)

    def train(self) -> dict[str, int]:
        """Change every weight; return the digest of each tensor."""
        for parameter in self.model.parameters():
            parameter.mul_(1.01)
        synchronise()
        digests = digest_layout(self.weights.layout, self.weights.storages).tolist()
        return dict(zip((tensor.name for tensor in self.weights.layout.tensors), digests, strict=True))


def make_trainer(context: ServiceContext, _: object, folder: str, size: str) -> tuple[Trainer, Asked]:
    trainer = Trainer(context, folder, size)
    return trainer, {"layout": trainer.layout, "train": trainer.train}


class Bench:
    """A trainer over there, an engine here, and the ways from one to the other."""

    def __init__(self, trainer: Remote, folder: Path) -> None:
        self.trainer = trainer
        source = layout.decode(trainer.ask("layout"))
        self.num_bytes = sum(storage.num_bytes for storage in source.storages)
        on_device = {"kv_cache_memory_bytes": 2**26} if DEVICE == "cpu" else {}
        cfg = VllmCfg(precision=str(DTYPE).removeprefix("torch."), max_model_len=MAX_LENGTH, gpu_memory_utilization=0.4)
        self.engine = VllmEngine(folder, cfg, extra=on_device)
        (wanted,) = self.engine.layouts()
        made = plan({"trainer-0": source}, {"rollout-0": wanted}, allow_alias=False).programs["rollout-0"]
        assert {transfer.transport for transfer in made.receives} == {"cuda_ipc" if DEVICE == "cuda" else "shm"}
        self.engine.install([made])
        self.names = [tensor.name for tensor in wanted.tensors]
        self.version = 0
        self.sent: dict[str, torch.Tensor] = {}
        self.other: dict[str, torch.Tensor] = {}

    def refit(self) -> float:
        """Bring a new version here; check it, beside the clock."""
        self.version += 1
        digests = self.trainer.ask("train")

        def take() -> None:
            self.engine.apply(self.version, 60.0)
            synchronise()

        seconds = seconds_of(take)
        (found,) = self.engine.digest_task(None).results()
        assert dict(zip(self.names, found.tolist(), strict=True)) == digests
        return seconds

    def load_weights(self) -> float:
        """Have vLLM load as much by name; what it holds then has no meaning."""

        def load() -> None:
            self.engine._llm.engine.collective_rpc(_load_weights, args=(self.sent,))
            synchronise()

        return seconds_of(load)

    def copy(self) -> float:
        """Copy as much on the device."""

        def copy() -> None:
            torch._foreach_copy_([*self.other.values()], [*self.sent.values()])
            synchronise()

        return seconds_of(copy)

    @contextmanager
    def with_tensors(self) -> Iterator[None]:
        """Hold what the other ways move, twice: what is sent, and where a plain copy goes."""
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(self.engine._model_folder)
            names = dict(transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).named_parameters())
        self.sent = {name: torch.full_like(held, 0.01, device=DEVICE) for name, held in names.items()}
        self.other = {name: torch.empty_like(held) for name, held in self.sent.items()}
        try:
            yield
        finally:
            self.sent, self.other = {}, {}

    def generate(self) -> int:
        """Make as many tokens for each of the prompts; return how many in all."""
        generator = np.random.default_rng(self.version)
        sampling = SamplingParameters(
            temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=NUM_NEW, stop_token_ids=(), stop_strings=()
        )
        for number in range(NUM_PROMPTS):
            prompt = tuple(generator.integers(1, 500, 16 + number % 16).tolist())
            self.engine.add_request(
                SequenceRequest(request_id=number, prompt_ids=prompt, sampling=sampling, seed=number)
            )
        num_tokens = 0
        while self.engine.num_unfinished:
            num_tokens += sum(len(completion.token_ids_T) for completion in self.engine.step())
        return num_tokens


def _load_weights(worker: Any, tensors: dict[str, torch.Tensor]) -> None:
    worker.model_runner.get_model().load_weights(iter(tensors.items()))


@pytest.fixture(params=SIZES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "model"
    with started(make_trainer, config_json("full"), {"trainer-0": (str(folder), request.param)}) as remotes:
        made = Bench(remotes["trainer-0"], folder)
        try:
            yield made
        finally:
            made.engine.close()


def test_new_weights(benchmark: Any, bench: Bench) -> None:
    ways: dict[str, Callable[[], float]] = {
        "copy on the device": bench.copy,
        "tandem, in place": bench.refit,
        "vLLM's load_weights": bench.load_weights,
    }
    with bench.with_tensors():
        turns = Turns(ways)
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
    report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"{bench.num_bytes / 1e9:.2f} GB into vLLM",
        num_bytes=bench.num_bytes,
        against="copy on the device",
        device=device(),
    )


def test_tokens_and_sleep(benchmark: Any, bench: Bench) -> None:
    bench.refit()
    num_tokens = NUM_PROMPTS * NUM_NEW
    found: dict[str, list[float]] = {"tokens/s": [], "seconds to sleep": [], "seconds to wake": [], "bytes freed": []}

    def turn() -> None:
        made: list[int] = []
        found["tokens/s"].append(num_tokens / seconds_of(lambda: made.append(bench.generate())))
        assert made == [num_tokens]
        awake = memory_taken()
        found["seconds to sleep"].append(seconds_of(bench.engine.sleep))
        found["bytes freed"].append(awake - memory_taken())
        found["seconds to wake"].append(seconds_of(bench.engine.wake))
        bench.refit()

    benchmark.pedantic(turn, rounds=NUM_ROUNDS, warmup_rounds=1)
    medians = {what: median(values[-NUM_ROUNDS:]) for what, values in found.items()}
    benchmark.extra_info.update({**medians, "bytes of weights": bench.num_bytes, "device": device()})
    keep_ratios(benchmark, "bytes freed by sleep, of the weights", {"vLLM": medians["bytes freed"] / bench.num_bytes})
    print(f"\n{bench.num_bytes / 1e9:.2f} GB of weights, {NUM_PROMPTS} prompts x {NUM_NEW} tokens: {medians}")


@pytest.mark.parametrize("size", COLOCATED)
def test_colocated_steps(benchmark: Any, size: str, tmp_path: Path) -> None:
    """GRPO steps in turns on the same device: seconds by part, and the peak memory of each phase."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run_config(size)))
    command = [str(Path(sys.executable).parent / "coordinator"), "up", "config.yaml"]

    def run() -> None:
        subprocess.run(command, check=True, cwd=tmp_path, timeout=1500)

    benchmark.pedantic(run, rounds=1)
    from tandem.observe.run_folder.journal import read_journal

    with read_journal(tmp_path / "run") as journal:
        steps = journal.steps()[2:]  # the first two warm up
    seconds = {part: median(step.seconds[part] for step in steps) for part in steps[0].seconds}
    memory = {name: value for name, value in steps[-1].metrics.items() if name.startswith("memory_")}
    tokens = median(step.metrics["tokens_per_s"] for step in steps)
    benchmark.extra_info.update({"median seconds": seconds, "memory": memory, "tokens/s": tokens, "device": device()})
    parts = {part: s / seconds["total"] for part, s in seconds.items() if part != "total"}
    keep_ratios(benchmark, f"share of a step, {size}", parts)
    print(f"\n{size}: median seconds {seconds}; tokens/s {tokens}; {memory}")


def run_config(size: str) -> dict[str, Any]:
    model = settings_of(size)
    del model["vocab_size"]  # of the characters
    num_prompts, num_samples = (16, 8) if DEVICE == "cuda" else (4, 4)
    return {
        "grpo": {
            "num_prompts_per_step": num_prompts,
            "num_generations_per_prompt": num_samples,
            "max_num_steps": 7 if DEVICE == "cuda" else 4,
            "val_period": 0,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": "model",
            "new_model": {"characters": "0123456789+-= ", "config": model},
            "precision": str(DTYPE).removeprefix("torch."),
            "max_total_sequence_length": MAX_LENGTH,
            "train_global_batch_size": num_prompts * num_samples,
            "train_micro_batch_size": 8,
            "logprob_batch_size": 8,
            "generation": {
                "backend": "vllm",
                "max_new_tokens": NUM_NEW,
                "vllm_cfg": {"gpu_memory_utilization": 0.4},
                "vllm_kwargs": {"kv_cache_memory_bytes": 2**26} if DEVICE == "cpu" else {},
                "colocated": {"enabled": True},
            },
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-4}},
        },
        "data": {
            "dataset_name": "reasoning_gym",
            "task": "chain_sum",
            "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "num_train": 128,
            "num_validation": 16,
            "prompt_template": "{metadata[expression]}",
        },
        "checkpointing": {"enabled": False, "metric_name": "reward"},
        "logger": {"log_dir": "run", "tensorboard_enabled": False},
        "cluster": {"deadlines": {"build_s": 900.0}},
    }


def memory_taken() -> int:
    """Return the bytes taken on the device, by whomever; on a CPU, those of this process."""
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    import psutil

    return int(psutil.Process().memory_info().rss)


def device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
