"""Training of adapters on the DTensor backend against a plain loop with PEFT, and what it leaves on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import transformers

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models.lora import is_adapter
from tandem.coordinator.cli import main
from tandem.observe.run_folder.found_models import models_in
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.lora import linear_layers
from tests.harness.model_types.shrinking import shrink
from tests.harness.trainers.reference_lora import (
    Start,
    Trained,
    assert_same_training,
    plain_steps,
    sft_loss,
    without_warnings,
    write_adapters,
)
from tests.harness.trainers.trainer_harness import (
    digest_of,
    evaluate_on,
    make_batch,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    said_by,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
LORA = {"enabled": True, "dim": 4, "alpha": 16}
SP2 = {"tensor_parallel_size": 2, "sequence_parallel": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, recomputed": (1, {"activation_checkpointing": True}, {"train_micro_batch_size": 8}),
    "FSDP2": (2, {}, {}),
    "TP2, packed": (2, {"tensor_parallel_size": 2}, {"sequence_packing": {"enabled": True}}),
    "TP2 with sequence parallelism": (2, SP2, {}),
    "CP2": (2, {"context_parallel_size": 2}, {"sequence_packing": {"enabled": True}}),
    "FSDP2 with TP2": (4, {"tensor_parallel_size": 2}, {}),
}


class Plain(NamedTuple):
    """A plain loop's model before training, and what training came to."""

    start: Start
    trained: Trained

    @property
    def folder(self) -> Path:
        return self.start.folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """SFT of adapters, a conversation at a time."""
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    start = write_adapters(folder, tmp_path_factory.mktemp("adapters"))
    return Plain(start, plain_steps(start, BATCHES, sft_loss))


def config_of(plain: Plain, dtensor: dict[str, Any], policy: dict[str, Any], **keys: Any) -> Config:
    lora = {**LORA, "restore_from": str(plain.start.adapters), **dtensor.get("lora_cfg", {})}
    return make_config(
        plain.folder, **{"algorithm": "sft", **keys}, dtensor_cfg={**dtensor, "lora_cfg": lora}, **policy
    )


def rank(rank: int, config: Config, folder: Path) -> tuple[list[tuple[float, float]], list[str]]:
    """Train on all batches; nothing but adapters may change, and nothing but they may have a state."""
    backend = DTensorBackend(config, checkpoint=None)
    held = backend._held["policy", 0]
    base = {name: each.detach().clone() for name, each in held.parameters.items() if not is_adapter(name)}
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    for name, before in base.items():
        assert not held.parameters[name].requires_grad
        assert torch.equal(step_local(before), step_local(held.parameters[name])), name
    assert len(held.optimizer.state) == len(held.parameters) - len(base)
    backend.save(folder).num_bytes.result()
    names = [tensor.name for tensor in backend.weights().layout.tensors]
    return [(each["loss"], each["grad_norm"]) for each in metrics], names


def step_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


@pytest.mark.parametrize(("num_ranks", "dtensor", "policy"), CASES.values(), ids=CASES)
def test_three_steps_are_those_of_plain_peft(
    num_ranks: int, dtensor: dict[str, Any], policy: dict[str, Any], plain: Plain, tmp_path: Path
) -> None:
    config = config_of(plain, dtensor, policy, trainers=num_ranks)
    for steps, names in run_ranks(num_ranks, rank, config, tmp_path):
        assert_same_training(steps, tmp_path / "policy", plain.start, plain.trained)
        assert "model.layers.1.mlp.down_proj.weight" in names
        assert "model.layers.1.mlp.down_proj.lora_B.weight" in names
        assert not [name for name in names if "base_" in name or "default" in name]


def smoke_rank(rank: int, config: Config, other: Config, batches: list[SampleBatch]) -> Any:
    """Train with adapters; then ask for a reference, of them and of a backend that holds one of its own."""
    backend = DTensorBackend(config, checkpoint=None)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    assert [name for name, _ in backend._held] == ["policy"], "no second copy"
    mine = said_by(backend, batches[0], config, "reference")
    policy = said_by(backend, batches[0], config, "policy")
    separate = DTensorBackend(other, checkpoint=None)
    theirs = said_by(separate, batches[0], other, "reference")
    assert [name for name, _ in separate._held] == ["policy", "reference"]
    return metrics, np.array_equal(mine, theirs), np.abs(mine - policy).max()


@pytest.mark.parametrize(
    ("num_ranks", "algorithm", "settings"),
    [
        (2, "dpo", {"train_global_batch_size": 4, "dtensor_cfg": {"tensor_parallel_size": 2}}),
        (2, "grpo", {"precision": "bfloat16", "loss": {"reference_policy_kl_penalty": 0.1}}),
    ],
)
def test_the_reference_is_the_base_and_no_second_copy(
    num_ranks: int, algorithm: str, settings: dict[str, Any], plain: Plain
) -> None:
    keys: dict[str, Any] = {"algorithm": algorithm, "trainers": num_ranks, "train_micro_batch_size": 2, **settings}
    dtensor = keys.pop("dtensor_cfg", {})
    config = config_of(plain, dtensor | {"lora_cfg": {"restore_from": None}}, {}, **keys)
    other = make_config(plain.folder, **keys, dtensor_cfg=dtensor)
    for metrics, is_equal, moved in run_ranks(num_ranks, smoke_rank, config, other, BATCHES):
        assert all(np.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in metrics)
        assert is_equal, "to the bit"
        assert moved > 1e-3, "and the policy says something else"


def resume_rank(rank: int, config: Config, num: int, checkpoint: Path | None, folder: Path | None) -> Any:
    backend = DTensorBackend(config, checkpoint=checkpoint)
    batches = BATCHES[-num:] if checkpoint is not None else BATCHES[:num]
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    if folder is not None:
        backend.save(folder).num_bytes.result()
    return metrics, digest_of(backend)


def test_it_is_resumed_to_the_bit_and_merged(plain: Plain, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of(plain, {}, {}, trainers=2)
    # New adapters, which begin as the seed says: the same in another process.
    lora = msgspec.structs.replace(config.policy.dtensor_cfg.lora_cfg, restore_from=None)
    dtensor = msgspec.structs.replace(config.policy.dtensor_cfg, lora_cfg=lora)
    config = msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, dtensor_cfg=dtensor))
    whole = run_ranks(2, resume_rank, config, 3, None, None)
    run_ranks(2, resume_rank, config, 1, None, tmp_path / "step_1")
    after = run_ranks(2, resume_rank, config, 2, tmp_path / "step_1", tmp_path / "step_3")
    for (metrics, digest), (later, digest_after) in zip(whole, after, strict=True):
        assert later == metrics[1:]
        assert digest_after == digest

    policy, target = tmp_path / "step_3" / "policy", tmp_path / "merged"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {p.name for p in policy.iterdir()}
    assert main(["merge", str(tmp_path / "step_3"), str(target)]) == 0, capfd.readouterr().err
    with without_warnings():
        base = transformers.AutoModelForCausalLM.from_pretrained(plain.folder)
        expected = peft.PeftModel.from_pretrained(base, policy).merge_and_unload().state_dict()
    merged = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert merged.state_dict().keys() == expected.keys()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    # What is trained is what is merged.
    trained = run_ranks(1, logits_rank, config, tmp_path / "step_3")[0]
    with torch.no_grad():
        logits_BTV = merged(input_ids=torch.arange(3, 19)[None]).logits
    torch.testing.assert_close(torch.tensor(trained), logits_BTV, rtol=0, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(target)("1+1=") is not None
    capfd.readouterr()
    assert main(["merge", str(tmp_path / "step_3"), str(target)]) == 1
    assert capfd.readouterr().err == f"error: {target} exists: name another folder\n"
    with pytest.raises(ModelError, match="holds adapters, not a model: `coordinator merge"):
        models_in(tmp_path / "step_3")


def logits_rank(rank: int, config: Config, checkpoint: Path) -> Any:
    backend = DTensorBackend(config, checkpoint=checkpoint)
    with torch.no_grad():
        return backend._held["policy", 0].model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits.tolist()


def experts_rank(rank: int, config: Config, folder: Path) -> Any:
    backend = DTensorBackend(config, checkpoint=None)
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES[:2]]
    backend.save(folder).num_bytes.result()
    dist.barrier()  # each rank writes a part of it
    adapted = {name for name in backend._held["policy", 0].parameters if is_adapter(name)}
    reloaded = DTensorBackend(config, checkpoint=folder)
    batch = make_batch(2, seed=3)
    return [each["grad_norm"] for each in metrics], adapted, evaluate_on(reloaded, batch, config)["loss"]


@pytest.mark.parametrize("sizes", [SP2, {"expert_parallel_size": 2}], ids=["TP2 + SP", "EP2"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])
def test_a_mixture_of_experts_has_adapters_beside_its_experts(
    architecture: str, sizes: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In attention, and in dense layers and shared experts."""
    folder = make_model(tmp_path / "model", architecture)
    lora = {**LORA, "exclude_modules": ["*.mlp.experts.*", "gate"]}
    config = make_config(folder, algorithm="sft", dtensor_cfg={**sizes, "lora_cfg": lora}, trainers=2)
    ranks = run_ranks(2, experts_rank, config, tmp_path / "step_3")
    for norms, adapted, _ in ranks:
        assert all(norm > 0 for norm in norms)
        assert adapted
        assert not [name for name in adapted if ".experts." in name]
        in_feed_forward = {".".join(name.split(".")[3:-2]) for name in adapted if ".mlp." in name}
        parts = ("gate_proj", "up_proj", "down_proj") if architecture == "glm4_moe" else ()
        assert in_feed_forward == {f"mlp.{of}{part}" for of in ("", "shared_experts.") for part in parts}
    with without_warnings():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "step_3/policy")
    assert main(["merge", str(tmp_path / "step_3"), str(tmp_path / "merged")]) == 0, capfd.readouterr().err
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        for model in (loaded, merged):
            assert ranks[0][2] == pytest.approx(float(sft_loss(model, make_batch(2, seed=3))), abs=1e-5)


EXPERTS_CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-MoE, one rank, recomputed": (
        "qwen3_moe",
        1,
        {"activation_checkpointing": True},
        {"train_micro_batch_size": 8},
    ),
    "Qwen3-MoE, EP2": ("qwen3_moe", 2, {"expert_parallel_size": 2}, {}),
    "Mixtral, FSDP2": ("mixtral", 2, {}, {}),
    "Qwen3-Next, FSDP2": ("qwen3_next", 2, {}, {}),
    "GLM-4.5, TP2 with sequence parallelism": ("glm4_moe", 2, SP2, {}),
}


@pytest.mark.parametrize(("architecture", "num_ranks", "dtensor", "policy"), EXPERTS_CASES.values(), ids=EXPERTS_CASES)
def test_three_steps_of_experts_and_routers_are_those_of_plain_peft(
    architecture: str, num_ranks: int, dtensor: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    """By PEFT's own ``all-linear``, to which layers beside experts are added that it forgets."""
    folder = make_model(tmp_path / "model", architecture)
    start = write_adapters(folder, tmp_path / "adapters", with_experts=True)
    plain = Plain(start, plain_steps(start, BATCHES, sft_loss))
    config = config_of(plain, dtensor, policy, trainers=num_ranks)
    for steps, names in run_ranks(num_ranks, rank, config, tmp_path / "step_3"):
        assert_same_training(steps, tmp_path / "step_3/policy", plain.start, plain.trained)
        assert "model.layers.1.mlp.experts.0.up_proj.lora_B.weight" in names
        assert "model.layers.1.mlp.gate.lora_B.weight" in names
    # Merged as by PEFT.
    assert main(["merge", str(tmp_path / "step_3"), str(tmp_path / "merged")]) == 0
    with without_warnings():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "step_3/policy")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    batch = make_batch(2, seed=3)
    with torch.no_grad():
        assert float(sft_loss(merged, batch)) == pytest.approx(float(sft_loss(loaded, batch)), abs=1e-5)


def dropout_rank(rank: int, config: Config) -> Any:
    """Train a step; what is said of the first batch afterwards, twice, has nothing left out."""
    backend = DTensorBackend(config, checkpoint=None)
    metrics = train_on(backend, BATCHES[0], config).metrics
    said = [evaluate_on(backend, BATCHES[1], config)["loss"] for _ in range(2)]
    return metrics["loss"], metrics["grad_norm"], said


@pytest.mark.parametrize(
    ("position", "layers"), [("pre", ["q_proj", "k_proj", "v_proj"]), ("post", ["o_proj", "down_proj"])]
)
def test_dropout_is_the_same_however_ranks_share_a_layer(position: str, layers: list[str], plain: Plain) -> None:
    """Where they hold the same numbers, that is: and whether or not activations are computed again."""
    lora = {**LORA, "match_all_linear": False, "target_modules": layers, "dropout_position": position}

    def config_with(dropout: float, **dtensor: Any) -> Config:
        adapters = {**lora, "dropout": dropout}
        trainers = dtensor.get("tensor_parallel_size", 1)
        keys: dict[str, Any] = {"algorithm": "sft", "train_micro_batch_size": 4, "trainers": trainers}
        return make_config(plain.folder, **keys, dtensor_cfg={**dtensor, "lora_cfg": adapters})

    recomputed = {"activation_checkpointing": True}
    (one,) = run_ranks(1, dropout_rank, config_with(0.3))
    (again,) = run_ranks(1, dropout_rank, config_with(0.3, **recomputed))
    (without,) = run_ranks(1, dropout_rank, config_with(0.0))
    assert again == one, "to the bit"
    assert one[1] != pytest.approx(without[1], rel=1e-3)
    assert one[2][0] == one[2][1]
    for other in run_ranks(2, dropout_rank, config_with(0.3, tensor_parallel_size=2, **recomputed)):
        assert other[0] == pytest.approx(one[0], abs=1e-5)
        assert other[1] == pytest.approx(one[1], rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "names"), [("deepseek_v4", {"o_a_proj"}), ("phimoe", {"router"}), ("falcon", set())]
)
def test_a_subclass_that_computes_something_else_is_no_linear_layer(model_type: str, names: set[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(shrink(model_type))
    modules = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    left_out = modules - {*linear_layers(model)} - {"lm_head"}
    assert {name.rpartition(".")[2] for name in left_out} == names
