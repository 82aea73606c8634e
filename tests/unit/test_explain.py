"""``coordinator plan``: what it says of every example, against closed forms and the layouts themselves."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from tandem.config import Config, load_config
from tandem.coordinator.cli import main
from tandem.coordinator.forecast.plan import explain
from tandem.coordinator.forecast.sides import ForecastSide, model_shape, sides
from tandem.coordinator.forecast.transfers import RefitForecast, predict
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.layout import ITEM_SIZES

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "examples" / "plans"
LARGEST = "deepseek-v3-ep64pp8-to-tp64.yaml"
"""And the same on disjoint GPUs: 512 ranks to 512."""
TRANSPORTS = {
    "llama-8b-fsdp8-to-tp2.yaml": {"cuda_ipc"},
    "llama-70b-tp8pp2-to-tp8.yaml": {"stream"},
    "qwen3-30b-ep8-to-tp4.yaml": {"cuda_ipc"},
    "qwen3-30b-fsdp16ep8-to-tp4.yaml": {"cuda_ipc", "stream"},
    "qwen3-235b-tp8pp8ep32-to-tp16dp16.yaml": {"stream"},
    "deepseek-v3-pp16ep16-to-tp32dp8.yaml": {"stream"},
    "deepseek-v3-fp8.yaml": {"stream"},
}
LLAMA = "llama-8b-fsdp8-to-tp2.yaml"
LLAMA_LORA = "llama-8b-lora.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples name their models relative to the repository."""
    monkeypatch.chdir(ROOT)


def planned(name: str, *overrides: str) -> tuple[ForecastSide, ForecastSide, RefitForecast]:
    config = load_config(PLANS / name, overrides, to_run=False)
    trainers, engines = laid_out(config)
    return trainers, engines, predict(config, trainers, engines)


def laid_out(config: Config) -> tuple[ForecastSide, ForecastSide]:
    model = model_shape(config)
    assert not isinstance(model, str), model
    return sides(config, model)


def test_differences_are_predicted_at_one_percent(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 282 GB that trainers stream to engines on other hosts, 1.6 bytes move for each byte that has changed."""
    path = str(PLANS / "llama-70b-tp8pp2-to-tp8.yaml")
    _, _, whole = planned("llama-70b-tp8pp2-to-tp8.yaml")
    _, _, smaller = planned("llama-70b-tp8pp2-to-tp8.yaml", "refit.differences=auto")
    assert whole.differences is None
    found = smaller.differences
    assert found is not None
    assert smaller.cost == whole.cost, "engines that hold no version before"
    assert found.num_whole == sum(link.num_bytes for link in whole.survey.links if link.round == 0)
    assert found.num_bytes == pytest.approx(0.016 * found.num_whole, rel=1e-3)
    assert found.cost.seconds == pytest.approx(0.016 * whole.cost.seconds, rel=0.05)
    assert sum(found.kept_bytes.values()) == found.num_whole
    assert smaller.memory["trainer-0"] == whole.memory["trainer-0"] + found.kept_bytes["trainer-0"]
    assert main(["plan", path, "refit.differences=auto"]) == 0
    printed = capsys.readouterr().out
    assert "if 1% has changed: 4.52 GB by stream instead of 282.21; a trainer keeps up to 17.64 GB" in printed


def test_no_differences_are_predicted_where_none_are_sent() -> None:
    for name in (LLAMA, LLAMA_LORA, "llama-8b-lora-disjoint.yaml"):
        assert planned(name, "refit.differences=auto")[2].differences is None


def wanted_bytes(engines: ForecastSide) -> dict[str, int]:
    """What each engine rank wants, as it travels: what is quantised comes in 16 bits, and its scales do not come."""
    size_of: dict[str, int] = {
        tensor.name: 2 if tensor.block else ITEM_SIZES[tensor.dtype]
        for tensor in engines.model.tensors
        if tensor.name not in engines.model.names_of_scales
    }
    at_place: dict[Any, int] = {}
    found = {}
    deployment: ParallelDeployment = engines.deployment
    for rank in range(deployment.num_ranks):
        place = deployment.place(rank)
        if place not in at_place:
            layout = deployment.parameters(engines.model, rank)
            sizes = [size_of.get(tensor.name, 0) for tensor in layout.tensors]
            num_T = np.zeros(len(sizes), np.int64)
            np.add.at(num_T, layout.pieces.tensor_P, layout.pieces.shape_PD.prod(axis=1))
            at_place[place] = int((num_T * np.array(sizes, np.int64)).sum())
        found[f"rollout-{rank}"] = at_place[place]
    return found


def llama_rank_bytes(model: str, tp: int) -> int:
    """What a rank of vLLM has of a Llama in bfloat16: a share of every matrix, and all norms."""
    text = (ROOT / "examples" / "models" / model / "config.json").read_text()
    has: dict[str, int] = {key: value for key, value in json.loads(text).items() if isinstance(value, int)}
    hidden, num_layers = has["hidden_size"], has["num_hidden_layers"]
    head = hidden // has["num_attention_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * head * has["num_key_value_heads"]
    matrices = num_layers * (attention + 3 * hidden * has["intermediate_size"]) + 2 * has["vocab_size"] * hidden
    assert matrices % tp == 0
    return 2 * (matrices // tp + (2 * num_layers + 1) * hidden)


def deepseek_engine_bytes(tp: int) -> int:
    """What an engine of vLLM has of DeepSeek-V3 in bfloat16: what is not cut is there once for every rank."""
    hidden, num_layers, num_dense, num_experts = 7168, 61, 3, 256
    q_rank, kv_rank, rope, num_heads = 1536, 512, 64, 128
    num_sparse = num_layers - num_dense
    cut = 2 * 129280 * hidden + num_dense * 3 * hidden * 18432 + num_sparse * (num_experts + 1) * 3 * hidden * 2048
    cut += num_layers * num_heads * ((128 + rope) * q_rank + (128 + 128) * kv_rank + 128 * hidden)
    whole = num_layers * (hidden * (q_rank + kv_rank + rope) + q_rank + kv_rank + 2 * hidden)
    whole += hidden + num_sparse * num_experts * hidden
    biases = num_sparse * num_experts  # of routers, in float32
    return 2 * (cut + tp * whole) + 4 * tp * biases


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_engine_receives_what_it_wants_and_no_more(name: str) -> None:
    _, engines, explained = planned(name)
    found = explained.survey
    assert found.ingress == wanted_bytes(engines)
    assert {link.transport for link in found.links} == TRANSPORTS[name]
    predicted = explained.cost
    assert 0 < predicted.bound_s <= predicted.seconds < 2 * predicted.bound_s
    assert predicted.bound_s == max(predicted.egress_s, predicted.ingress_s, predicted.install_s)
    assert predicted.limited_by
    # What streams needs buckets at both ends; what copies out of another's memory needs none.
    streaming = {end for link in found.links if link.transport == "stream" for end in (link.source, link.destination)}
    assert {member for member, num_bytes in explained.memory.items() if num_bytes} == streaming
    page = (ROOT / "docs" / "refit.md").read_text()
    assert row_of(name, explained) in page, "docs/refit.md says otherwise"


def row_of(name: str, explained: RefitForecast) -> str:
    """What the table of the documentation says of an example."""
    memory = [num for member, num in explained.memory.items() if member.startswith("rollout")]
    return row(name, explained.cost.seconds, explained.cost.bound_s, max(memory, default=0))


def row(name: str, predicted_s: float, bound_s: float, peak: int) -> str:
    """Two digits: more would change with every change to how the planner deals bytes out."""
    seconds = (f"{float(f'{s:.2g}'):g} s" if s >= 0.1 else f"{s * 1e3:.2g} ms" for s in (predicted_s, bound_s))
    return " | ".join([f"{name})", *seconds, f"{float(f'{peak / 1e9:.2g}'):g} GB" if peak else "none"]) + " |"


@pytest.mark.parametrize("name", [LLAMA_LORA, "llama-8b-lora-disjoint.yaml"])
def test_a_version_of_adapters_is_the_adapters_alone(name: str) -> None:
    _, engines, explained = planned(name)
    found = explained.survey
    assert explained.frozen_cost is not None
    # All of the weights, once: what a version without adapters has.
    whole, frozen = wanted_bytes(engines), dict.fromkeys(found.ingress, 0)
    for link in found.frozen_links:
        frozen[link.destination] += link.num_bytes
    assert frozen == whole
    assert explained.frozen_cost.seconds > 20 * explained.cost.seconds
    # For a rank of two, of rank 16: of what is cut by rows all of A and half of B, of the others the reverse.
    hidden, heads, intermediate = 4096, (4096, 1024, 1024), 14336
    by_rows = sum(hidden + rows // 2 for rows in (*heads, intermediate, intermediate))
    by_columns = sum(columns // 2 + hidden for columns in (hidden, intermediate))
    num_adapter_elements = 32 * 16 * (by_rows + by_columns)
    held = 4 * num_adapter_elements
    # Engines widen what comes in bfloat16 to float32, which is how they pass it on.
    fewest = held // 2 if "disjoint" in name else held
    assert all(fewest <= num_bytes <= held for num_bytes in found.ingress.values())
    # Beside the weights an engine has those of the layers that have adapters once more, and adapters in float32.
    layers = 32 * (hidden * (hidden + sum(heads)) + 3 * hidden * intermediate)
    assert set(found.staging.values()) == {layers // 2 * 2 + held}


def test_what_is_said_of_adapters() -> None:
    out = io.StringIO()
    explain(load_config(PLANS / LLAMA_LORA, [], to_run=False), Console(file=out, width=160))
    said = out.getvalue()
    assert "trained are adapters of 224 layers: 41.9 million parameters in 448 tensors" in said
    # A frozen model in bfloat16, and of 41.9 million parameters in float32 themselves, gradients and two moments.
    assert re.search(r"frozen weights +adapters +gradients +optimizer +activations +buffers +in all", said)
    assert re.search(r"optimizer step +2\.01 +0\.02 +0\.02 +0\.04 +0\.00 +0\.00 +2\.09", said)
    assert "reference model" not in said
    assert re.search(r"first refit +22\.\d+ ms more: 64\.24 GB of frozen weights by cuda_ipc; limited by: ", said)


def test_a_reference_has_the_precision_of_the_passes_where_what_is_trained_has_float32() -> None:
    out = io.StringIO()
    explain(load_config(PLANS / LLAMA, [], to_run=False), Console(file=out, width=160))
    assert re.search(r"optimizer step +4\.02 +4\.02 +8\.03 +2\.01 +0\.00 +0\.00 +18\.07", out.getvalue())


def test_each_example_is_covered() -> None:
    names = {path.name for path in PLANS.glob("*.yaml")} - {"base.yaml", LLAMA_LORA, "llama-8b-lora-disjoint.yaml"}
    assert names == {*TRANSPORTS, LARGEST, LARGEST.replace(".yaml", "-disjoint.yaml")}


def test_bytes_are_those_of_the_closed_form() -> None:
    _, _, llama_8b = planned(LLAMA)
    assert llama_8b.survey.ingress == {f"rollout-{r}": llama_rank_bytes("Llama-3.1-8B", 2) for r in range(8)}
    assert sum(llama_8b.survey.egress.values()) == 8 * llama_rank_bytes("Llama-3.1-8B", 2)
    _, _, llama_70b = planned("llama-70b-tp8pp2-to-tp8.yaml")
    assert set(llama_70b.survey.ingress.values()) == {llama_rank_bytes("Llama-3.1-70B", 8)}
    # Each engine has a host to itself, where norms, which all of its ranks want, are sent to once.
    passed_on = sum(link.num_bytes for link in llama_70b.survey.links if link.round == 1)
    assert passed_on == 2 * 7 * 2 * (2 * 80 + 1) * 8192


def test_fields_of_the_model_that_are_replaced_are_planned_as_they_are() -> None:
    sizes = [
        model_shape(load_config(PLANS / LLAMA, [f"policy.hf_config_overrides.num_hidden_layers={num}"], to_run=False))
        for num in (1, 2)
    ]
    assert not any(isinstance(each, str) for each in sizes)
    one, two = (each.num_parameters for each in sizes if not isinstance(each, str))
    hidden, feed_forward = 4096, 14336
    assert two - one == hidden * (2 * hidden + 2 * 1024 + 3 * feed_forward + 2)
    assert one - (two - one) == 2 * 128256 * hidden + hidden


def test_deepseek_on_512_ranks_takes_less_than_4_gib() -> None:
    script = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from tandem.config import load_config
from tandem.coordinator.forecast.transfers import predict
from tandem.coordinator.forecast.sides import model_shape, sides
config = load_config("examples/plans/{LARGEST}", to_run=False)
explained = predict(config, *sides(config, model_shape(config)))
links = [(link.source, link.destination, link.transport, link.round, link.num_bytes) for link in explained.survey.links]
print(json.dumps([len(explained.survey.ingress), explained.cost.seconds, explained.cost.bound_s,
    sum(num_bytes for *_, num_bytes in links), sorted({{transport for _, _, transport, _, _ in links}}),
    max(num for member, num in explained.memory.items() if member.startswith("rollout"))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    num_engines, seconds, bound_s, num_bytes, transports, peak = json.loads(done.stdout)
    assert num_engines == 512
    assert num_bytes == 8 * deepseek_engine_bytes(64)
    assert transports == ["cuda_ipc", "stream"]
    assert bound_s <= seconds < 2 * bound_s
    page = (ROOT / "docs" / "refit.md").read_text()
    assert row(LARGEST, seconds, bound_s, peak) in page, "docs/refit.md says otherwise"


def test_what_is_printed() -> None:
    written = io.StringIO()
    explain(load_config(PLANS / LLAMA, to_run=False), Console(file=written))
    text = written.getvalue()
    for line in (
        "examples/models/Llama-3.1-8B: 8.0 billion parameters in 291 tensors",
        "8 trainer ranks: DTensor, FSDP8; float32",
        "8 engine ranks: vLLM TP2, 4 engines; bfloat16",
        "on the same GPUs, 8 a node",
        "same host, and both are in GPU memory",
    ):
        assert line in text
    total = f"{8 * llama_rank_bytes('Llama-3.1-8B', 2) / 1e9:.2f}"
    assert re.search(rf"^cuda_ipc +64 +{total} ", text, re.MULTILINE)
    assert re.search(r"^lower bound +\S+ ms += max\(egress \S+ ms, ingress \S+ ms, install \S+ ms\)$", text, re.M)
    assert re.search(r"^predicted +\S+ ms +limited by: rollout-\d receives \S+ GB from GPU to GPU$", text, re.M)
    assert max(map(len, text.splitlines())) <= 120


def test_a_model_made_from_scratch_is_planned_for_the_cpu() -> None:
    """The embedded engine runs there, and reads a single trainer's memory in place where it may."""
    config = load_config(ROOT / "examples" / "arithmetic_sft.yaml", to_run=False)
    policy = msgspec.structs.replace(config.policy, model_name="there-is-no-such-folder")
    config = msgspec.structs.replace(config, policy=policy)
    trainers, engines = laid_out(config)
    explained = predict(config, trainers, engines)
    assert [(link.transport, link.num_bytes) for link in explained.survey.links] == [("alias", 0)]
    assert explained.cost.seconds == 0
    refit = msgspec.structs.replace(config.refit, alias="never")
    explained = predict(msgspec.structs.replace(config, refit=refit), trainers, engines)
    assert [(link.transport, link.num_bytes) for link in explained.survey.links] == [
        ("shm", 4 * trainers.model.num_parameters)
    ]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (LLAMA, ["policy.model_name=examples"], "policy.model_name: 'examples' holds no config.json"),
        (
            LLAMA,
            ["cluster.trainers=6", "policy.dtensor_cfg.tensor_parallel_size=4"],
            "cluster.trainers: 6 is not a multiple of 4, the product of policy.dtensor_cfg.tensor_parallel_size (4)",
        ),
        (
            "llama-70b-tp8pp2-to-tp8.yaml",
            ["cluster.trainers=8"],
            "is not a multiple of 16, the product of policy.megatron_cfg.tensor_model_parallel_size (8), "
            "pipeline_model_parallel_size (2)",
        ),
        (
            LLAMA,
            ["policy.generation.vllm_cfg.precision=int3"],
            "policy.generation.vllm_cfg.precision: 'int3' is not one of auto, bfloat16",
        ),
        (LLAMA, ["policy.generation.vllm_cfg.tensor_parallel_size=3"], "cannot be split over 3 ranks"),
        ("deepseek-v3-fp8.yaml", ["policy.generation.vllm_cfg.tensor_parallel_size=32"], "blocks of 128"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    name: str, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(PLANS / name), *overrides]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_a_damaged_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert main(["plan", str(PLANS / LLAMA), f"policy.model_name={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'config.json'} cannot be read: ")


def test_vllm_takes_its_element_type_from_the_policy() -> None:
    for precision, item_size in (("auto", 2), ("half", 2), ("float", 4)):
        _, engines, explained = planned(LLAMA, f"policy.generation.vllm_cfg.precision={precision}")
        assert explained.survey.ingress["rollout-0"] == llama_rank_bytes("Llama-3.1-8B", 2) // 2 * item_size
        assert len({tensor.dtype for tensor in engines.model.tensors}) == 1


PPO = (
    "algorithm=ppo",
    "ppo.num_prompts_per_step=64",
    "ppo.num_generations_per_prompt=8",
    "value.megatron_cfg.tensor_model_parallel_size=4",
    "value.megatron_cfg.pipeline_model_parallel_size=1",
)


def test_a_value_model_is_planned_by_its_own_parallel_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(PLANS / "llama-70b-tp8pp2-to-tp8.yaml"), *PPO]
    assert main(command) == 0
    said = capsys.readouterr().out
    # A quarter of its matrices, all norms, and a scalar head in place of the output layer; the embedding is padded to
    # a multiple of 512 rows.
    weights = llama_rank_bytes("Llama-3.1-70B", 4) + 2 * (8192 + 1) - 2 * 8192 * (128256 - 256) // 4
    line = f"value, on the same ranks: Megatron-Core TP4 × DP4; bfloat16; {weights / 1e9:,.2f} GB of weights a rank, "
    assert line in said
    # In bfloat16, of each element 2 bytes of weights and 2 of gradients; a fourth of 16 bytes of optimizer state.
    assert f"a rank, {4 * weights / 1e9:,.2f} GB with gradients and optimizer" in said
    assert re.search(r"^passes of the value ", said, re.MULTILINE)

    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    policy, value = found["models"]
    assert (policy["division"], value["division"]) == ("Megatron-Core TP8 × PP2", "Megatron-Core TP4 × DP4")
    assert (value["ranks"], value["sizes"]["tp"], value["sizes"]["dp"]) == (16, 4, 4)
    assert value["weights"] == weights
    assert value["learning"] == pytest.approx(3 * weights, rel=1e-6)
    phases = {phase["name"]: phase for phase in found["phases"]}
    resident = phases["forward and backward passes"]["held"]["value"]
    assert resident == pytest.approx(3.5 * weights, rel=1e-6), "without copies of gradients in float32"
    assert phases["optimizer step of the value"]["held"]["value"] == weights + value["learning"]
    assert phases["passes of the value"]["num_bytes"] == sum(phases["passes of the value"]["held"].values())


def test_models_with_processes_of_their_own_take_none_of_the_trainers_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ("cluster.processes_of={value: 4, reference: 16}", "cluster.num_nodes=7")
    assert main(["plan", str(PLANS / "llama-70b-tp8pp2-to-tp8.yaml"), *PPO, *own, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranks = {model["name"]: (model["ranks"], model["has_processes"]) for model in found["models"]}
    assert ranks == {"policy": (16, False), "value": (4, True), "reference": (16, True)}
    assert all("value" not in name and "reference" not in name for phase in found["phases"] for name in phase["held"])


def test_a_plan_as_json_says_why_the_model_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PLANS / LLAMA), "policy.model_name=nowhere", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["unknown"], found["models"]) == ("no config.json of it is here", [])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_planning_imports_no_torch(options: list[str]) -> None:
    script = f"""
import sys
from tandem.coordinator.cli import main
code = main(["plan", "examples/plans/{LLAMA}", *{options}])
print(code, "torch" in sys.modules, "zmq" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"


def test_a_type_that_transformers_does_not_build_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    assert main(["plan", str(PLANS / LLAMA), f"policy.model_name={tmp_path}"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"unknown: .*because Transformers [\d.]+ cannot build it: .*`of_tomorrow`", output)
    assert "set policy.model_name" not in output, "the folder has a config.json"
