"""What is vLLM worth on a CPU beside the embedded engine, and what do its new weights cost?

Same model, same prompts, same number of threads, turns taken in one process. vLLM reads its environment once and
disables `torch.set_num_threads`, so this file is run alone: ``pytest benchmarks/test_vllm.py -s``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
from measure import Turns, keep_ratios, report, seconds_of
from smoke import sized

from tandem.rollout.engines.vllm import insides

NUM_THREADS = 1
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
if "torch" in sys.modules:
    pytest.skip("something has imported torch before: run this file alone", allow_module_level=True)
insides.prepare_environment(NUM_THREADS)

import torch  # noqa: E402
import transformers  # noqa: E402

from tandem.common.messages import SamplingParameters  # noqa: E402
from tandem.config.schema.generation import VllmCfg  # noqa: E402
from tandem.refit.digests.task import digest_layout  # noqa: E402
from tandem.refit.layout import Layout  # noqa: E402
from tandem.refit.planner import plan  # noqa: E402
from tandem.refit.transports import shm  # noqa: E402
from tandem.rollout.engine import Engine, SequenceRequest  # noqa: E402
from tandem.rollout.engines.skeleton import weights_of  # noqa: E402
from tandem.rollout.engines.transformers import TransformersEngine  # noqa: E402
from tandem.rollout.engines.vllm.engine import VllmEngine  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

NUM_PROMPTS = 64
NUM_NEW = 64
MAX_LENGTH = 128
CACHE_BYTES = 2**27
VOCABULARY = 512
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
}
"""3.4 million parameters: that of the other benchmarks of generation."""
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
"""About 400 MB in float32."""
NUM_ROUNDS = 7
NUM_STARTS = 3
START = """
import json, sys, time
from pathlib import Path
from tandem.rollout.engines.vllm import insides
kind, folder, max_length, cache_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
started = time.perf_counter()
if kind == "vllm":
    insides.prepare_environment(1)
    import vllm.v1.engine.llm_engine
    from tandem.config.schema.generation import VllmCfg
    from tandem.rollout.engines.vllm.engine import VllmEngine
    imported = time.perf_counter()
    settings = VllmCfg(precision="float32", max_model_len=max_length)
    engine = VllmEngine(folder, settings, extra={"kv_cache_memory_bytes": cache_bytes})
else:
    from tandem.rollout.engines.transformers import TransformersEngine
    imported = time.perf_counter()
    engine = TransformersEngine(
        folder, num_slots=64, max_total_sequence_length=max_length, dtype="float32", num_threads=1
    )
ready = time.perf_counter()
if kind == "vllm":
    engine.close()
print(json.dumps({"import": imported - started, "start": ready - imported}))
"""

LOAD = """
import json, sys, time
from pathlib import Path
from tandem.rollout.engines.vllm import insides
kind, folder, cache_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
insides.prepare_environment(1)
import vllm.v1.engine.llm_engine
from vllm.model_executor.model_loader import default_loader
from tandem.config.schema.generation import VllmCfg
from tandem.rollout.engines.vllm import learned
from tandem.rollout.engines.vllm.engine import VllmEngine
seconds = {"load": 0.0, "probe": 0.0}
def note(owner, name, part):
    function = getattr(owner, name)
    def timed(*args, **kwargs):
        started = time.process_time()
        result = function(*args, **kwargs)
        seconds[part] += time.process_time() - started
        return result
    setattr(owner, name, timed)
note(default_loader.DefaultModelLoader, "load_weights", "load")
note(learned, "_learn", "probe")
settings, extra = VllmCfg(precision="float32", max_model_len=128), {"kv_cache_memory_bytes": cache_bytes}
started = time.process_time()
engine = VllmEngine(folder, settings, extra=extra, with_weights=kind == "vllm's own load")
seconds["start"] = time.process_time() - started
engine.close()
print(json.dumps(seconds))
"""
EXPERTS = {
    "hidden_size": sized(512, 64),
    "num_hidden_layers": sized(8, 2),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": sized(1024, 32),
    "num_local_experts": sized(8, 4),
    "num_experts_per_tok": 2,
}
"""About 440 MB in float32, of a family without a table."""


def make_model(folder: Path, sizes: dict[str, int]) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **sizes,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    config.save_pretrained(folder)
    return model


def share(model: Any) -> Layout:
    """Move a model's parameters into shared memory, and describe them as a trainer would."""
    weights = weights_of(model)
    storages = tuple(
        msgspec.structs.replace(storage, address=shm.share(weights.storages[storage.name]))
        for storage in weights.layout.storages
    )
    return msgspec.structs.replace(weights.layout, storages=storages)


def install(engine: Engine, source: Layout, *, allow_alias: bool) -> int:
    """Return the bytes that every refit copies."""
    (wanted,) = engine.layouts()
    programs = plan({"trainer-0": source}, {"rollout-0": wanted}, allow_alias=allow_alias).programs
    return engine.install([programs["rollout-0"]]).num_bytes


@contextlib.contextmanager
def running_vllm(folder: Path) -> Iterator[VllmEngine]:
    settings = VllmCfg(precision="float32", max_model_len=MAX_LENGTH)
    engine = VllmEngine(folder, settings, extra={"kv_cache_memory_bytes": CACHE_BYTES})
    assert torch.get_num_threads() == NUM_THREADS
    try:
        yield engine
    finally:
        engine.close()


def make_requests(num_new_R: Sequence[int]) -> list[SequenceRequest]:
    """Prompts of 16 to 31 tokens, no two the same."""
    generator = np.random.default_rng(0)
    return [
        SequenceRequest(
            request_id=index,
            prompt_ids=tuple(generator.integers(1, VOCABULARY, 16 + index % 16).tolist()),
            sampling=SamplingParameters(
                temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=num_new, stop_token_ids=(), stop_strings=()
            ),
            seed=index,
        )
        for index, num_new in enumerate(num_new_R)
    ]


def generate(engine: Engine, requests: Sequence[SequenceRequest]) -> int:
    for request in requests:
        engine.add_request(request)
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(completion.token_ids_T) for completion in engine.step())
    return num_tokens


def lengths(name: str) -> list[int]:
    if name == "equal":
        return [NUM_NEW] * NUM_PROMPTS
    return [int(length) for length in np.random.default_rng(1).integers(8, NUM_NEW + 1, NUM_PROMPTS)]


@pytest.mark.parametrize("name", ["equal", "ragged"])
def test_tokens_per_second(benchmark: Any, name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, SMALL)
    requests = make_requests(lengths(name))
    num_tokens = sum(request.sampling.max_new_tokens for request in requests)
    embedded = TransformersEngine(
        tmp_path, num_slots=NUM_PROMPTS, max_total_sequence_length=MAX_LENGTH, dtype="float32"
    )
    with running_vllm(tmp_path) as vllm:
        for engine in (embedded, vllm):
            install(engine, share(model), allow_alias=False)
            engine.apply(0, 60.0)

        def way(engine: Engine) -> Callable[[], float]:
            def measured() -> float:
                if engine is vllm:
                    vllm._llm.reset_caches()  # a prompt that was computed a round ago costs nothing
                made: list[int] = []
                seconds = seconds_of(lambda: made.append(generate(engine, requests)))
                assert made == [num_tokens]
                return seconds

            return measured

        turns = Turns({"vLLM": way(vllm), "embedded": way(embedded)})
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
    medians = {kind: median(seconds) for kind, seconds in turns.last(NUM_ROUNDS).items()}
    rates = {kind: num_tokens / seconds for kind, seconds in medians.items()}
    benchmark.extra_info.update(
        {
            "num_tokens": num_tokens,
            "seconds": turns.last(NUM_ROUNDS),
            "median tokens/s": rates,
            "vLLM, times as fast as embedded": rates["vLLM"] / rates["embedded"],
            "load": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, "times as fast as the embedded engine", {f"vLLM, {name}": rates["vLLM"] / rates["embedded"]})
    print(f"\n{NUM_PROMPTS} prompts, {name} lengths, {num_tokens} tokens: {rates} tokens/s, medians of {NUM_ROUNDS}")


def test_seed_of_each_request(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs that a request draws by a seed of its own: beside one generator of the engine's for all."""
    import vllm

    model, sampling_of = make_model(tmp_path, SMALL), vllm.SamplingParams
    requests = make_requests([sized(NUM_NEW, 4)] * sized(NUM_PROMPTS, 4))
    num_rounds = sized(NUM_ROUNDS, 1)
    num_tokens = sum(request.sampling.max_new_tokens for request in requests)
    with running_vllm(tmp_path) as engine:
        install(engine, share(model), allow_alias=False)
        engine.apply(0, 60.0)

        def way(*, is_seeded: bool) -> Callable[[], float]:
            def unseeded(*, seed: int, **others: Any) -> Any:
                return sampling_of(**others)

            def measured() -> float:
                monkeypatch.setattr(vllm, "SamplingParams", sampling_of if is_seeded else unseeded)
                engine._llm.reset_caches()
                before = time.process_time()  # what else the machine does counts for more than this costs
                generate(engine, requests)
                return time.process_time() - before

            return measured

        turns = Turns({"a seed of each": way(is_seeded=True), "one for all": way(is_seeded=False)})
        benchmark.pedantic(turns.round, rounds=num_rounds, warmup_rounds=1)
    medians = {kind: median(seconds) for kind, seconds in turns.last(num_rounds).items()}
    ratio = medians["a seed of each"] / medians["one for all"]
    benchmark.extra_info.update(
        {"median seconds": medians, "seconds": turns.last(num_rounds), "ratio": ratio, "load": os.getloadavg()}
    )
    keep_ratios(benchmark, "processor time, times one generator's", {"a seed of each request": ratio})
    print(
        f"\n{len(requests)} requests, {num_tokens} tokens: {medians} CPU seconds; a seed of each costs {ratio - 1:.1%}"
    )


DEEP = {
    "hidden_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
}
"""About 200 MB in float32, of which a draft of one layer has a sixteenth."""
NUM_DRAFTED = 4
DRAFTS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTED, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": NUM_DRAFTED},
}


def make_pair(folder: Path) -> Any:
    """Make a policy whose first layer says most, and of that layer a draft; return the policy."""
    policy = make_model(folder / "policy", sized(DEEP, {**SMALL, "num_hidden_layers": 2}))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)  # so that tokens are not all as likely
        for layer in policy.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    config = transformers.Qwen3Config(**{**policy.config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    draft = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wanted = draft.state_dict()
    draft.load_state_dict({name: tensor for name, tensor in policy.state_dict().items() if name in wanted})
    draft.save_pretrained(folder / "draft")
    return policy


@pytest.mark.long(minutes=5)
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts(benchmark: Any, width: int, temperature: float, tmp_path: Path) -> None:
    """Speculative decoding beside without: tokens a second of processor time, and tokens in each step of a request."""
    policy, num_rounds = make_pair(tmp_path), sized(3, 1)
    requests = [
        msgspec.structs.replace(
            each,
            prompt_ids=each.prompt_ids[:8] * 2,  # n-grams have something to find
            sampling=msgspec.structs.replace(each.sampling, temperature=temperature),
        )
        for each in make_requests([sized(NUM_NEW, 4)] * sized(width, 1))
    ]
    rates: dict[str, float] = {}
    per_step: dict[str, float] = {}
    for kind, speculation in DRAFTS.items():
        if kind == "ngram" and importlib.util.find_spec("numba") is None:
            continue
        extra: dict[str, Any] = {"kv_cache_memory_bytes": CACHE_BYTES}
        if speculation is not None:
            model = {"model": str(tmp_path / "draft")} if kind == "draft_model" else {}
            extra["speculative_config"] = {**speculation, **model}
        engine = VllmEngine(tmp_path / "policy", VllmCfg(precision="float32", max_model_len=MAX_LENGTH), extra=extra)
        try:
            install(engine, share(policy), allow_alias=False)
            engine.apply(0, 60.0)
            seconds, num_steps, num_tokens = [], 0, 0
            for _ in range(1 + num_rounds):
                engine._llm.reset_caches()
                before, num_steps = time.process_time(), 0
                for request in requests:
                    engine.add_request(request)
                num_tokens = 0
                while engine.num_unfinished:
                    num_tokens += sum(len(completion.token_ids_T) for completion in engine.step())
                    num_steps += 1
                seconds.append(time.process_time() - before)
        finally:
            engine.close()
        rates[kind] = num_tokens / median(seconds[1:])
        per_step[kind] = num_tokens / len(requests) / num_steps
    benchmark.pedantic(lambda: None)
    ratios = {kind: rate / rates["none"] for kind, rate in rates.items()}
    benchmark.extra_info.update({"tokens/s": rates, "tokens a step": per_step, "ratio": ratios})
    keep_ratios(benchmark, f"times as fast as without drafts, {width} at temperature {temperature:g}", ratios)
    print(f"\n{len(requests)} requests at temperature {temperature}: {rates} tokens/s, {per_step} a step, {ratios}")


@pytest.mark.long(minutes=1)
def test_start(benchmark: Any, tmp_path: Path) -> None:
    """From nothing to an engine that waits for its weights: a process for each start."""
    make_model(tmp_path, SMALL)
    parts: dict[str, list[dict[str, float]]] = {"vllm": [], "embedded": []}

    def way(kind: str) -> Callable[[], float]:
        def measured() -> float:
            command = [sys.executable, "-c", START, kind, str(tmp_path), str(MAX_LENGTH), str(CACHE_BYTES)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            parts[kind].append(json.loads(ended.stdout.splitlines()[-1]))
            return sum(parts[kind][-1].values())

        return measured

    turns = Turns({kind: way(kind) for kind in parts})
    benchmark.pedantic(turns.round, rounds=NUM_STARTS)
    medians = {
        kind: {part: median(one[part] for one in found) for part in ("import", "start")}
        for kind, found in parts.items()
    }
    benchmark.extra_info.update({"median seconds": medians, "seconds": parts, "load": os.getloadavg()})
    starts = {kind: sum(each.values()) for kind, each in medians.items()}
    keep_ratios(benchmark, "seconds to start, times vLLM's", {"embedded": starts["embedded"] / starts["vllm"]})
    print(f"\nuntil an engine waits for weights, seconds, medians of {NUM_STARTS}: {medians}")


@pytest.mark.long(minutes=3)
def test_learning_a_layout(benchmark: Any, tmp_path: Path) -> None:
    """What the probe of vLLM's loader costs a start, next to an engine that loads a checkpoint: a process for each.

    In seconds of the processor, of which each process has one thread: a busy machine changes them little.
    """
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**EXPERTS, vocab_size=VOCABULARY, max_position_embeddings=256)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    parts: dict[str, list[dict[str, float]]] = {"vllm's own load": [], "learned": [], "proven again": []}

    def way(kind: str) -> Callable[[], float]:
        def measured() -> float:
            cache = tmp_path / ("kept" if kind == "proven again" else f"cache {len(parts[kind])}")
            command = [sys.executable, "-c", LOAD, kind, str(tmp_path / "model"), str(CACHE_BYTES)]
            environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
            parts[kind].append(json.loads(ended.stdout.splitlines()[-1]))
            return parts[kind][-1]["start"]

        return measured

    turns = Turns({kind: way(kind) for kind in parts})
    turns.round()  # files come into memory, and the layout into its cache
    benchmark.pedantic(turns.round, rounds=sized(NUM_STARTS, 1))
    best = {kind: {part: min(one[part] for one in found[1:]) for part in found[0]} for kind, found in parts.items()}
    start, load = (best["vllm's own load"][part] for part in ("start", "load"))
    probes = {kind: each["probe"] for kind, each in best.items() if each["probe"]}
    benchmark.extra_info.update({"best seconds": best, "seconds": parts, "load": os.getloadavg()})
    of_start = {kind: seconds / start for kind, seconds in probes.items()}
    keep_ratios(
        benchmark, "processor seconds of the probe, share of the start of an engine that loads", of_start, aim=1.0
    )
    keep_ratios(
        benchmark, "processor seconds of the probe, times the loader's", {k: s / load for k, s in probes.items()}
    )
    print(f"\nbest of {NUM_STARTS} starts, processor seconds: {best}")


def names(layout: Layout) -> list[str]:
    return [tensor.name for tensor in layout.tensors]


def _load_weights(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    worker.model_runner.get_model().load_weights(iter(tensors))


class Refits:
    """A model that changes, an engine that follows it, and every way to bring one to the other."""

    def __init__(self, model: Any, engine: VllmEngine) -> None:
        self.model, self.engine = model, engine
        self.source = share(model)
        self.held = weights_of(model).storages
        self.local = {name: torch.ones_like(held) for name, held in self.held.items()}
        self.version = 0

    def turn(self, way: Callable[[], object]) -> Callable[[], float]:
        """Change every weight, and time the way."""

        def measured() -> float:
            self.version += 1
            with torch.no_grad():
                for held in self.held.values():
                    held.mul_(1.001)
            return seconds_of(way)

        return measured

    def checked(self, way: Callable[[], object]) -> Callable[[], float]:
        """Return `turn` with a comparison of every tensor's digest behind it."""
        timed = self.turn(way)

        def measured() -> float:
            seconds = timed()
            theirs = dict(zip(names(self.source), digest_layout(self.source, self.held).tolist(), strict=True))
            (found,), (held,) = self.engine.digest_task(None).results(), self.engine.layouts()
            assert dict(zip(names(held), found.tolist(), strict=True)) == theirs
            return seconds

        return measured

    def memcpy(self) -> None:
        """Copy as much within this process with the C library; the engine gets nothing."""
        for name, held in self.held.items():
            ctypes.memmove(self.local[name].data_ptr(), held.data_ptr(), held.nbytes)

    def apply(self) -> None:
        self.engine.apply(self.version, 60.0)

    def load_weights(self) -> None:
        """Have vLLM take the same tensors by itself, and forget what it had computed, as a refit does."""
        tensors = [(name, held.detach()) for name, held in self.model.named_parameters()]
        self.engine._llm.engine.collective_rpc(_load_weights, args=(tensors,))
        self.engine._llm.reset_caches()


def test_new_weights(benchmark: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path, LARGE)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with running_vllm(tmp_path) as engine:
        refits = Refits(model, engine)
        install(engine, refits.source, allow_alias=False)
        ways = {"in place": refits.apply, "vLLM's load_weights": refits.load_weights}
        turns = Turns(
            {"memcpy": refits.turn(refits.memcpy)} | {name: refits.checked(way) for name, way in ways.items()}
        )
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, warmup_rounds=1)
        # From here on the engine's parameters are the trainer's memory, and cannot be written.
        num_copied = install(engine, refits.source, allow_alias=True)
        # What else the machine does has changed by now, so memcpy has a turn here too.
        aliased = Turns({"memcpy, then": refits.turn(refits.memcpy), "aliased": refits.checked(refits.apply)})
        for _ in range(NUM_ROUNDS + 1):
            aliased.round()
    report(
        benchmark,
        turns.last(NUM_ROUNDS) | aliased.last(NUM_ROUNDS),
        title=f"{num_bytes / 1e6:.0f} MB of float32, {len(refits.held)} tensors, into vLLM",
        num_bytes=num_bytes,
        against="memcpy",
        num_bytes_copied_where_the_rest_is_aliased=num_copied,
        load=os.getloadavg(),
    )
