"""What does `refit.verify` add to the time from the last optimizer step to the first new token?

A trainer's memory and the real rollout service with its engine, in processes of their own, get the commands that a
coordinator gives after a training step: refit, then verify and generate. The trainer digests while the engine makes
tokens, and the engine digests between them, as in a run. A round does this with `off`, `sampled` and `full` in turns.
Checked: digests agree, and the tokens are those of a Hugging Face model with the same weights (greedily decoded).

``BENCHMARK_LAYERS=1`` makes a quick run of the same.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Turns, report
from processes import VERIFY, Asked, Plane, Remote, clock, config_json, started, take_samples
from pytest_benchmark.fixture import BenchmarkFixture
from refit_trainer import Trainer
from smoke import sized

from tandem.common.messages import BuildEngine, Generate, Problem, PromptGroup, SamplingParameters
from tandem.config import config_from_json
from tandem.launch.service import ServiceContext
from tandem.refit import layout
from tandem.samples.model_files import write_new_model

NUM_ROUNDS = sized(3, 1, long=7)
NUM_LAYERS = int(os.environ.get("BENCHMARK_LAYERS", sized("8", "1")))
NUM_GROUPS, NUM_SAMPLES, NUM_PROMPT, NUM_NEW = 4, 4, 16, 16
VOCABULARY = 2048
CHARACTERS = "".join(map(chr, range(0x100, 0x100 + VOCABULARY - 64)))
MODEL = {  # layers of Qwen3-0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def make(context: ServiceContext, connection: Connection, folder: str) -> tuple[Any, Asked]:
    """Be the trainer or the engine."""
    if context.name.startswith("trainer"):
        trainer = Trainer(context, folder)
        asked: Asked = {
            "layout": lambda: layout.encode(trainer.layout),
            "write": trainer.write,
            "expected": trainer.expected,
            "verify": trainer.verify,
        }
        return trainer, asked
    from tandem.rollout.service import RolloutService

    service = RolloutService(context)
    first: list[float] = []

    def watch() -> None:
        """Note when the engine has made its first tokens."""
        engine = service.parts.engine
        step = engine.step

        def timed() -> Any:
            completions = step()
            if not first:
                first.append(clock())
            return completions

        engine.step = timed  # type: ignore[method-assign]

    return service, {
        "layout": lambda: layout.encode(service.parts.engine.layouts()[0]),
        "verify": lambda mode: setattr(service.parts.weight_client, "_verify", mode),
        "watch": watch,
        "forget": first.clear,
        "first": lambda: first[0],
        "take": lambda command_id: take_samples(service, command_id),
    }


def model_config(folder: Path) -> bytes:
    """Write the model's files as a run does; return the configuration of the processes."""
    config = config_json(
        "full", model_name=str(folder / "model"), new_model={"characters": CHARACTERS, "config": MODEL}
    )
    policy = config_from_json(config).policy
    assert policy.new_model is not None
    write_new_model(Path(policy.model_name), policy.new_model)
    return config


class Bench:
    """One step after another, from the optimizer's last change to the last token."""

    def __init__(self, trainer: Remote, engine: Remote, config: bytes, *, alias: bool) -> None:
        self.trainer, self.engine = trainer, engine
        engine.command(BuildEngine(command_id=0, deadline_s=300.0))
        engine.receive()
        engine.ask("watch")
        self.plane = Plane([trainer], [engine], config, alias=alias)
        self.version = 0
        self.until_end: dict[str, list[float]] = {verify: [] for verify in VERIFY}
        self.until_verified: dict[str, list[float]] = {verify: [] for verify in VERIFY}
        self.until_held: dict[str, list[float]] = {verify: [] for verify in VERIFY}

    def generate(self) -> Generate:
        """Return a command for new tokens, other prompts for each version."""
        generator = torch.Generator().manual_seed(self.version)
        self.prompts = torch.randint(VOCABULARY - 64, (NUM_GROUPS, NUM_PROMPT), generator=generator).tolist()
        groups = tuple(
            PromptGroup(
                group=number,
                problem=Problem(problem_id=str(number), question="", answer="", metadata={}),
                prompt_ids=tuple(prompt_ids),
                seeds=tuple(range(NUM_SAMPLES)),
            )
            for number, prompt_ids in enumerate(self.prompts)
        )
        sampling = SamplingParameters(
            temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=NUM_NEW, stop_token_ids=(), stop_strings=()
        )
        promise = self.plane.promise()
        return Generate(
            cancel_before=promise["command_id"],
            step=self.version,
            purpose="train",
            sampling=sampling,
            groups=groups,
            **promise,
        )

    def step(self, verify: str) -> float:
        """Return the seconds to the first token."""
        self.version += 1
        for remote in (self.trainer, self.engine):
            remote.ask("verify", verify)
        self.trainer.ask("write", self.version)
        self.engine.ask("forget")
        command = self.generate()
        started_at = clock()
        self.plane.refit(self.version)
        self.until_held[verify].append(clock() - started_at)
        if verify != "off":
            self.plane.request_digests(self.version)
        self.engine.command(command)
        self._await_all(verify, started_at)
        first_tokens: dict[int, set[int]] = {}
        for group, _, token_ids in self.engine.ask("take", command.command_id):
            first_tokens.setdefault(group, set()).add(token_ids[NUM_PROMPT])
        expected = {group: {self.trainer.ask("expected", ids)} for group, ids in enumerate(self.prompts)}
        assert first_tokens == expected
        return float(self.engine.ask("first")) - started_at

    def _await_all(self, verify: str, started_at: float) -> None:
        digests: dict[str, bytes] = {}
        is_generated = False
        while not is_generated or (verify != "off" and len(digests) < 2):
            for remote in (self.trainer, self.engine):
                if not remote.connection.poll(0.001):
                    continue
                message, _ = remote.receive_all()
                match type(message).__name__:
                    case "DigestsReported":
                        digests[remote.name] = message.digests[0]
                        if len(digests) == 2:
                            self.plane.commit(self.version, digests)
                            self.until_verified[verify].append(clock() - started_at)
                    case "Generated":
                        is_generated = True
        self.until_end[verify].append(clock() - started_at)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "alias", [False, pytest.param(True, marks=pytest.mark.long(minutes=1))], ids=["copied", "read in place"]
)
def test_verification_until_the_first_token(benchmark: BenchmarkFixture, tmp_path: Path, alias: bool) -> None:
    config = model_config(tmp_path)
    folder = str(tmp_path / "model")
    with started(make, config, {"trainer-0": (folder,), "rollout-0": (folder,)}) as remotes:
        bench = Bench(remotes["trainer-0"], remotes["rollout-0"], config, alias=alias)
        turns = Turns({verify: (lambda verify=verify: bench.step(verify)) for verify in VERIFY})
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
        num_bytes = sum(s.num_bytes for s in layout.decode(bench.trainer.ask("layout")).storages)
    last = {
        name: {verify: times[-NUM_ROUNDS:] for verify, times in of.items() if times}
        for name, of in (
            ("seconds until held", bench.until_held),
            ("seconds until verified", bench.until_verified),
            ("seconds until the last token", bench.until_end),
        )
    }
    shares = report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"{num_bytes / 1e6:.0f} MB {'read in place' if alias else 'copied'}: until the first new tokens",
        num_bytes=num_bytes,
        against="off",
        load=os.getloadavg(),
        **last,
    )
    added = {verify: 1 / share - 1 for verify, share in shares.items()}
    benchmark.extra_info["added to the time to the first token"] = added
    for name, of in last.items():
        medians = ", ".join(f"{verify} {1e3 * sorted(times)[len(times) // 2]:.1f} ms" for verify, times in of.items())
        print(f"{name}: {medians}")
    print(", ".join(f"{verify} adds {100 * part:+.1f}%" for verify, part in added.items()))
