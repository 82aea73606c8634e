"""Layouts learned from vLLM's own loader, of families without a table, and the same as the tables."""

from __future__ import annotations

import copy
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import random_prompts, reference_logprobs, request, run_all

from tandem.common.errors import ModelError
from tandem.config.schema.generation import VllmCfg
from tandem.refit.layout import Layout
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.vllm import insides, learned, worker
from tandem.rollout.engines.vllm.engine import VllmEngine, engine_arguments
from tests.harness.runs.by_hand import undisturbed_run
from tests.harness.runs.running import Command, merged, process_of, write_config
from tests.vllm.run_harness import JUDGE, SEVENS, curve
from tests.vllm.vllm_harness import CHANGES, FAMILIES, LEARNED, all_parameters, refit, running, tiny_model, train

IN_BFLOAT16 = {"qwen3_next": 0.1, "qwen3_5_text": 0.1, "qwen3_5_moe_text": 0.1}
"""Families that vLLM computes in bfloat16 alone on a CPU, with how far log-probabilities then are from float32's.

Those of weights that vLLM has loaded itself are as far: 0.049 on processors that multiply in bfloat16 (0.004 in the
median), below 0.02 on others.
"""
EXTRA = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32}
ARCHITECTURES_OF_TWO = ("mixtral", "falcon_h1")
PROMPTS = random_prompts(6)


def make(architecture: str, folder: Path, **changes: Any) -> Any:
    """Build a model whose weights are all other than those it starts from, and save it."""
    model = tiny_model(architecture, folder, **{"initializer_range": 0.05, **changes})
    train(model, seed=0)
    model.save_pretrained(folder)
    return model


def reference(model: Any) -> Any:
    """Return the model as what tokens' log-probabilities are compared with."""
    model = copy.deepcopy(model)
    if model.config.model_type == "gemma2":
        model.set_attn_implementation("eager")  # no other caps what attention adds up
    model.model.do_not_compile = True  # vLLM's backend of Transformers' models asks each of its class
    return model


def sample(engine: VllmEngine) -> dict[int, EngineCompletion]:
    """Return responses to some prompts."""
    return run_all(engine, [request(index, prompt) for index, prompt in enumerate(PROMPTS)])


def load(folder: Path, settings: VllmCfg) -> list[dict[str, torch.Tensor]]:
    """Have vLLM load a checkpoint by itself; return what each worker then holds."""
    arguments = engine_arguments(folder, settings, EXTRA)
    llm = insides.InProcessLlm({**arguments, "load_format": "safetensors"})
    try:
        return all_parameters(llm)
    finally:
        llm.close()


def assert_equal(actual: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    """Check that all workers hold the same, bit for bit."""
    assert len(actual) == len(expected)
    for rank, (parameters, expected_ones) in enumerate(zip(actual, expected, strict=True)):
        assert parameters.keys() == expected_ones.keys()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected_ones[name]), f"worker {rank}: {name}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", LEARNED)
def test_a_refit_equals_load_weights(architecture: str, tmp_path: Path) -> None:
    model = make(architecture, tmp_path / "model")
    tolerance = IN_BFLOAT16.get(architecture)
    settings: dict[str, Any] = {"precision": "bfloat16" if tolerance else "float32"}
    cfg = VllmCfg(max_model_len=128, **settings)
    expected = load(tmp_path / "model", cfg)
    loaded = VllmEngine(tmp_path / "model", cfg, extra=EXTRA, with_weights=True)
    by_loaded = sample(loaded)
    loaded.close()
    with running(tmp_path / "model", settings) as engine:
        other = copy.deepcopy(model)
        train(other, seed=1)
        refit(engine, other, 0, allow_alias=True)
        sample(engine)
        refit(engine, model, 1, allow_alias=True)
        assert_equal(all_parameters(engine._llm), expected)
        responses = sample(engine)
    plain = reference(model)
    for index, response in responses.items():
        assert response.token_ids_T.tolist() == by_loaded[index].token_ids_T.tolist()
        assert response.logprobs_T.tolist() == by_loaded[index].logprobs_T.tolist()
        apart = np.abs(response.logprobs_T - reference_logprobs(plain, PROMPTS[index], response.token_ids_T)).max()
        assert apart < (tolerance or 1e-4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["heads", "stages"])
@pytest.mark.parametrize("architecture", ARCHITECTURES_OF_TWO)
def test_two_workers_learn_their_own_shares(architecture: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = make(architecture, tmp_path / "model")
    expected = load(tmp_path / "model", VllmCfg(precision="float32", max_model_len=128, **sizes))
    with running(tmp_path / "model", sizes) as engine:
        refit(engine, model, 0)
        assert_equal(all_parameters(engine._llm), expected)
        responses = sample(engine)
    plain = reference(model)
    for index, response in responses.items():
        apart = np.abs(response.logprobs_T - reference_logprobs(plain, PROMPTS[index], response.token_ids_T)).max()
        assert apart < 1e-4


@pytest.mark.timeout(900)
def test_workers_learn_which_experts_are_theirs(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path / "model")
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    expected = load(tmp_path / "model", VllmCfg(precision="float32", max_model_len=128, **sizes))
    with running(tmp_path / "model", sizes) as engine:
        refit(engine, model, 0)
        assert_equal(all_parameters(engine._llm), expected)


@pytest.mark.parametrize("architecture", [*CHANGES, *FAMILIES])
def test_what_is_learned_is_what_the_tables_say(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(architecture, tmp_path / "model")
    with running(tmp_path / "model") as engine:
        (by_table,) = engine.layouts()
    monkeypatch.setattr(worker, "VLLM_TABLES", ())
    with running(tmp_path / "model") as engine:
        (learned_layout,) = engine.layouts()
    assert dict(origins(learned_layout)) == dict(origins(by_table))


def origins(layout: Layout) -> Iterator[tuple[str, list[Any]]]:
    """Yield each parameter with the bytes of its elements and where each of them comes from, in their order."""
    rows = layout.pieces.storage_P.tolist()
    for number, storage in enumerate(layout.storages):
        places: list[Any] = []
        for row in (row for row, own in enumerate(rows) if own == number):
            piece, tensor = layout.piece(row), layout.tensors[int(layout.pieces.tensor_P[row])]
            for index in np.ndindex(piece.box.shape):
                at = piece.offset + sum(place * stride for place, stride in zip(index, piece.strides, strict=True))
                source = tuple(a + b for a, b in zip(piece.box.start, index, strict=True))
                places.append((at, tensor.name, source, tensor.dtype))
        yield storage.name, [storage.num_bytes, *sorted(places)]


def test_a_computed_parameter_without_a_rule_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("nemotron_h", tmp_path / "model")
    monkeypatch.setattr(learned, "COMPUTED", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = r"vLLM computes model.layers.0.mixer.A, model.layers.2.mixer.A from the checkpoint, and no rule says how"
    with pytest.raises(ModelError, match=expected), running(tmp_path / "model"):
        pass


def test_a_learned_layout_is_kept_and_proven_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mixtral", tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    learn, times = learned.LoaderProbe.learn, []

    def count(probe: learned.LoaderProbe, *, by_lines: bool) -> learned.LearnedMap:
        times.append(1)
        return learn(probe, by_lines=by_lines)

    monkeypatch.setattr(learned.LoaderProbe, "learn", count)
    for _ in range(2):
        with running(tmp_path / "model") as engine:
            (layout,) = engine.layouts()
    assert len(times) == 1, "the second engine reads what the first has learned"
    (path,) = (tmp_path / "cache").rglob("*.msgpack")
    kept = msgspec.msgpack.decode(path.read_bytes(), type=learned.LearnedMap)
    wrong = {
        **kept.slices,
        "model.norm.weight": (msgspec.structs.replace(kept.slices["model.norm.weight"][0], tensor=1),),
    }
    for damaged in (b"{", msgspec.msgpack.encode(msgspec.structs.replace(kept, slices=wrong))):
        path.write_bytes(damaged)
        with running(tmp_path / "model") as engine:
            assert engine.layouts()[0].fingerprint == layout.fingerprint
            refit(engine, model, 0)
    assert len(times) == 3


def test_what_lines_do_not_show_is_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.mixtral import MixtralForCausalLM

    model = make("mixtral", tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_weights, learn, kinds = MixtralForCausalLM.load_weights, learned.LoaderProbe.learn, []
    name, inside = "model.layers.1.self_attn.o_proj.weight", (slice(10, 12), slice(20, 22))

    def load_and_swap(loader: Any, weights: Any) -> set[str]:
        loaded: set[str] = load_weights(loader, weights)
        if name in loaded:
            rows = loader.get_parameter(name).data[inside]
            rows.copy_(rows.flip(0))
        return loaded

    def count(probe: learned.LoaderProbe, *, by_lines: bool) -> learned.LearnedMap:
        kinds.append(by_lines)
        return learn(probe, by_lines=by_lines)

    monkeypatch.setattr(MixtralForCausalLM, "load_weights", load_and_swap)
    monkeypatch.setattr(learned.LoaderProbe, "learn", count)
    with running(tmp_path / "model") as engine:
        refit(engine, model, 0)
        assert kinds == [True, False]
        expected = model.get_parameter(name).detach().clone()
        expected[inside] = expected[inside].flip(0)
        (parameters,) = all_parameters(engine._llm)
        assert torch.equal(parameters[name], expected)


def test_what_the_loader_does_not_take_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("deepseek_v3", tmp_path / "model", topk_method="greedy")
    with (
        pytest.raises(ModelError, match=r"refuses a checkpoint: .*e_score_correction_bias"),
        running(tmp_path / "model"),
    ):
        pass
    gc.collect()  # the error's frames hold the store of the process group


MIXTRAL_OF_TWO = merged(
    SEVENS,
    {
        "grpo": {"max_num_steps": 4},
        "policy": {
            "new_model": {
                "config": {
                    "model_type": "mixtral",
                    "num_local_experts": 4,
                    "num_experts_per_tok": 2,
                    "intermediate_size": 40,
                }
            },
            "generation": {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 2}},
        },
        "refit": {"verify": "full"},
    },
)


@pytest.mark.timeout(600)
def test_a_run_with_a_learned_layout_is_the_same_after_kill_9_of_its_engine(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "judging.py").write_text(JUDGE)
    whole = undisturbed_run(tmp_path / "whole", MIXTRAL_OF_TWO)
    assert curve(whole, "token_mult_prob_error").max() < 1.001
    Path("judging.py").write_text(JUDGE)
    with Command("coordinator", "up", write_config(MIXTRAL_OF_TWO)) as run:
        run.wait_for("step 2/4")
        process_of(run, "rollout").send_signal(signal.SIGKILL)
        run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    for metric in ("reward", "loss", "mean_generation_length"):
        assert curve("run", metric).tolist() == curve(whole, metric).tolist(), metric
