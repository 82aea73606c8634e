"""Multi-token prediction layers of a checkpoint: left alone, or trained with the policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config
from tandem.config.models.families import MTP, MTP_DRAFTS
from tandem.config.schema.policy import MtpConfig
from tandem.coordinator.forecast.activations import passes
from tandem.coordinator.forecast.memory import memory_of
from tandem.coordinator.forecast.sides import ForecastSide, model_shape, sides
from tandem.samples.batch import SampleBatch
from tandem.trainer import exposed_weights
from tandem.trainer.backends.mtp import attach_layers
from tandem.trainer.losses import Counts, Report
from tandem.trainer.losses.mtp import MtpLoss
from tandem.trainer.micro_batches import MicroBatch
from tests.harness.runs.pages_harness import ROOT, quoted
from tests.harness.runs.running import coordinator, steps_of, write_config
from tests.harness.trainers import megatron_harness
from tests.harness.trainers.reference import trained_weights
from tests.harness.trainers.trainer_harness import (
    add_mtp_layers,
    begin,
    evaluate_on,
    make_batch,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
MEGATRON = {"enabled": True, "optimizer": megatron_harness.OPTIMIZER, "mtp_num_layers": 1}
FACTOR = 0.3


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def make_with_layers(folder: Path, architecture: str = "glm4_moe", num: int = 1, **sizes: int) -> list[str]:
    """Write a model with these layers; return the names of their tensors."""
    if architecture == "deepseek_v3":
        megatron_harness.make_checkpoint(folder, architecture)
    else:
        make_model(folder, architecture, **sizes)
    return add_mtp_layers(folder, num)


def config_of(folder: Path, mtp: dict[str, Any] | None = None, **changes: Any) -> Config:
    """Return a configuration that trains the layers and clips gradients, unless `mtp` says otherwise."""
    section = {"num_layers": 1, "loss_scaling_factor": FACTOR, **(mtp or {})}
    return make_config(folder, mtp=section, max_grad_norm=0.5, **changes)


def train(rank: int, config: Config, folder: Path, batches: Sequence[SampleBatch], checkpoint: Path | None) -> Any:
    """Train on the batches, save, and return the metrics of each, and the names that engines are offered."""
    backend, _ = begin(rank, config, checkpoint)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    dist.barrier()
    return metrics, {tensor.name for tensor in backend.weights().layout.tensors}


def run(config: Config, folder: Path, *, ranks: int = 1, batches: Any = BATCHES, checkpoint: Path | None = None) -> Any:
    """Train in processes; return the metrics, and the tensors of the export."""
    (metrics, offered), *_ = run_ranks(ranks, train, config, folder, batches, checkpoint)
    assert not [name for name in offered if "mtp" in name], "engines get the policy alone"
    return metrics, tensors_in(folder / "policy")


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


def assert_moved(written: dict[str, torch.Tensor], folder: Path, names: Sequence[str]) -> None:
    """Check that an export has the names of its source, and other values for what is trained."""
    source = tensors_in(folder)
    assert written.keys() == source.keys()
    moved = {name for name in names if not torch.equal(written[name], source[name])}
    assert {name for name in names if name not in moved} <= {name for name in names if "e_score_correction" in name}
    for name in names:
        if name.endswith("embed_tokens.weight"):
            assert torch.equal(written[name], written["model.embed_tokens.weight"])
        elif name.endswith("shared_head.head.weight"):
            assert torch.equal(written[name], written["lm_head.weight"])


@pytest.mark.parametrize("policy", [{}, {"megatron_cfg": MEGATRON}], ids=["DTensor", "Megatron-Core"])
def test_layers_that_predict_later_tokens_are_not_read(policy: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = make_model(tmp_path / "plain", "glm4_moe", num_experts_per_tok=2)
    further = tmp_path / "further"
    make_with_layers(further, num_experts_per_tok=2)
    trained = {}
    for model in (plain, further):
        folder = tmp_path / f"trained {model.name}"
        config = make_config(model, **policy)
        (metrics, _), *_ = run_ranks(1, train, config, folder, BATCHES[:2], None)
        trained[model.name] = metrics, trained_weights(folder)
    assert trained["plain"][0] == trained["further"][0]
    assert trained["plain"][1].keys() == trained["further"][1].keys()
    assert all(torch.equal(trained["plain"][1][name], each) for name, each in trained["further"][1].items())


@pytest.mark.parametrize(("architecture", "num"), [("glm4_moe", 2), ("deepseek_v3", 2), ("qwen3_next", 1)])
def test_logits_are_those_of_transformers(architecture: str, num: int, tmp_path: Path) -> None:
    """By its own `MtpModel`, with which it drafts tokens."""
    make_with_layers(tmp_path, architecture, num)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    attach_layers(model, str(tmp_path), MtpConfig(num_layers=num), torch.float32)
    model.config.num_mtp_layers = num
    first = model.config.num_hidden_layers
    if getattr(model.config, "layer_types", None):
        model.config.mtp_layer_types = ["full_attention"] * num
    patterns = ["^mtp.*", *(rf"layers\.{number}\." for number in range(first, first + num))]
    model._keys_to_ignore_on_load_unexpected = patterns
    theirs: Any = MtpModel.from_pretrained(model)
    ids_BT = torch.randint(3, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        for depth, states_BTH in enumerate(model.mtp.predict(model, hidden_BTH, {"input_ids": ids_BT})):
            positions = torch.arange(9)[None] + depth + 1
            shifted_BT = ids_BT.roll(-depth - 1, dims=1)
            cache = MtpCache(config=theirs.config)
            hidden_BTH = theirs.forward_layer(depth, hidden_BTH, positions, cache, input_ids=shifted_BT)
            there = slice(0, 9 - depth - 1)
            difference = (model.lm_head(states_BTH) - model.lm_head(hidden_BTH))[:, there].abs().max()
            assert difference < 1e-5


@pytest.mark.parametrize("architecture", MTP)
def test_they_are_trained_and_exported(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    names = make_with_layers(folder, architecture)
    metrics, written = run(config_of(folder), tmp_path / "step_1", batches=BATCHES[:1])
    assert_moved(written, folder, names)
    assert all(2.5 < each["mtp_loss"] < 4.5 and 0 <= each["mtp_accuracy"] <= 1 for each in metrics)


@pytest.mark.parametrize(("architecture", "num"), [("glm4_moe", 2), ("qwen3_next", 1)])
def test_they_are_the_same_on_two_ranks_packed_and_resumed(architecture: str, num: int, tmp_path: Path) -> None:
    folder, mtp = tmp_path / "model", {"num_layers": num}
    make_with_layers(folder, architecture, num)
    config = config_of(folder, mtp)
    metrics, written = run(config, tmp_path / "step_3")
    assert largest_difference(run(config, tmp_path / "two/step_3", ranks=2)[1], written) < 1e-6
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    packed = config_of(folder, mtp, sequence_packing=packing)
    assert largest_difference(run(packed, tmp_path / "packed/step_3")[1], written) < 1e-6
    run(config, tmp_path / "part/step_2", batches=BATCHES[:2])
    resumed = run(config, tmp_path / "part/step_3", batches=BATCHES[2:], checkpoint=tmp_path / "part/step_2")
    assert resumed[0] == metrics[2:]
    assert all(torch.equal(written[name], tensor) for name, tensor in resumed[1].items())


def test_detached_layers_leave_the_policy_as_it_is_without_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    names = make_with_layers(folder)
    metrics, written = run(config_of(folder, {"detach_heads": True}), tmp_path / "detached/step_3")
    plain = make_config(folder, max_grad_norm=0.5, share_prompts=False)
    expected_metrics, expected = run(plain, tmp_path / "plain/step_3")
    own = expected.keys() - set(names)
    assert all(torch.equal(written[name], expected[name]) for name in own)
    kept = [{name: each[name] for name in expected_metrics[0]} for each in metrics]
    assert kept == expected_metrics
    assert_moved(written, folder, names)
    _, joined = run(config_of(folder), tmp_path / "joined/step_3")
    assert not all(torch.equal(joined[name], expected[name]) for name in own)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainers": 2, "dtensor_cfg": {"expert_parallel_size": 2}},
        {"activation_checkpointing_enabled": True},
    ],
    ids=["experts", "recomputed"],
)
def test_layouts_do_not_matter(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_with_layers(folder)
    metrics, written = run(config_of(folder), tmp_path / "plain/step_3")
    found, other = run(config_of(folder, **changes), tmp_path / "other/step_3", ranks=changes.get("trainers", 1))
    assert largest_difference(written, other) < 1e-6
    assert [each["mtp_loss"] for each in found] == pytest.approx([each["mtp_loss"] for each in metrics], rel=1e-5)


def test_one_layer_is_applied_repeatedly(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    names = make_with_layers(folder, "qwen3_5_text")
    metrics, written = run(config_of(folder, {"num_layers": 3, "use_repeated_layer": True}), tmp_path / "step_3")
    assert_moved(written, folder, names)
    assert all(2.5 < each["mtp_loss"] < 4.5 for each in metrics)


def evaluate(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    backend, _ = begin(rank, config)
    before = evaluate_on(backend, batch, config)
    return before


def test_supervised_training_has_their_loss_too_and_validation_the_policys_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_with_layers(folder)
    metrics, _ = run(config_of(folder, algorithm="sft"), tmp_path / "step_3")
    assert all("mtp_loss" in each for each in metrics)
    (validated,) = run_ranks(1, evaluate, config_of(folder, algorithm="sft"), make_batch())
    assert "mtp_loss" not in validated
    assert validated["loss"] > 0


def test_the_run_of_the_page_trains_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "training.md").read_text().partition("## Multi-token prediction layers")[2]
    (words, _), *_ = quoted(page.partition("\n## ")[0])
    monkeypatch.chdir(tmp_path)
    names = make_with_layers(tmp_path / "model")
    write_config({"policy": {"new_model": None}, "grpo": {"max_num_steps": 2, "val_period": 0}})
    ended = coordinator(*words[1:])
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr}"
    assert all(2.0 < step.metrics["mtp_loss"] < 5.0 for step in steps_of("run"))
    (policy,) = (tmp_path / "run").glob("**/step_2/policy")
    assert_moved(tensors_in(policy), tmp_path / "model", names)


def held_bytes(rank: int, config: Config) -> dict[str, int]:
    """Return the bytes of this rank's parts of the policy's tensors, by their names in memory."""
    backend: Any = begin(rank, config)[0]
    held = backend.policy.parameters | backend.policy.buffers
    return {name: exposed_weights.local_of(tensor).nbytes for name, tensor in held.items()}


def plan_trainers(config: Config) -> ForecastSide:
    shape = model_shape(config)
    assert not isinstance(shape, str)
    return sides(config, shape)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", MTP)
def test_weights_are_planned_as_trainers_hold_them(architecture: str, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    names = make_with_layers(folder, architecture)
    changes: dict[str, Any] = {"trainers": ranks, "loss": {"reference_policy_kl_penalty": 0.1}}
    config, without = config_of(folder, **changes), make_config(folder, **changes)
    trainers = plan_trainers(config)
    planned = []
    for rank, held in enumerate(run_ranks(ranks, held_bytes, config)):
        storages = trainers.deployment.parameters(trainers.model, rank).storages
        planned.append({storage.name: storage.num_bytes for storage in storages if storage.num_bytes})
        assert planned[rank] == {name: num for name, num in held.items() if num}
    plain = plan_trainers(without).model
    added = trainers.model.num_parameters - plain.num_parameters
    copies = ("embed_tokens.weight", "shared_head.head.weight")  # of the policy's, in the file alone
    assert added == sum(tensors_in(folder)[name].numel() for name in names if not name.endswith(copies))
    memory, of_policy = memory_of(config, trainers), memory_of(without, plan_trainers(without))
    of_layers = sum(size for name, size in planned[memory.rank].items() if name.startswith("mtp."))
    more = {name: size - of_policy.resident[name] for name, size in memory.resident.items()}
    assert more == {"weights": of_layers, "gradients": of_layers, "optimizer": 2 * of_layers, "reference model": 0}


def find_kept_bytes(rank: int, config: Config, batch: MicroBatch) -> int:
    """Return the bytes that autograd keeps for these layers in a forward pass, without those of parameters."""
    policy: Any = begin(rank, config)[0].policy
    counted = []
    for predicts in (False, True):
        policy._scorer.predicts = predicts
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            home = tensor.untyped_storage()
            given = {each.untyped_storage().data_ptr() for each in policy.model.parameters() if each.numel()}
            if home.data_ptr() not in given:
                kept[home.data_ptr()] = home.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scores = policy._scorer(batch)
        counted.append(sum(kept.values()))
        del scores
    return counted[1] - counted[0]


@pytest.mark.parametrize("num", [1, 2])
def test_activations_are_planned_as_autograd_keeps_them(num: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_with_layers(folder, num=num, hidden_size=256, moe_intermediate_size=128, head_dim=64)
    num_rows, length = 8, 64
    changes: dict[str, Any] = {
        "max_total_sequence_length": length,
        "train_micro_batch_size": num_rows,
        "train_global_batch_size": num_rows,
        "generation": {"max_new_tokens": length // 2},
    }
    config = config_of(folder, {"num_layers": num}, **changes)
    is_scored_BT = torch.zeros((num_rows, length), dtype=torch.bool)
    is_scored_BT[:, length // 2 :] = True
    batch = MicroBatch(
        rows=tuple(range(num_rows)),
        lengths_B=torch.full((num_rows,), length),
        token_ids_BT=torch.randint(3, 24, (num_rows, length)),
        attention_mask_BT=torch.ones_like(is_scored_BT),
        loss_mask_BT=is_scored_BT,
    )
    with_layers, without = (
        passes(each, plan_trainers(each), 0)[-1].activations for each in (config, make_config(folder, **changes))
    )
    (kept,) = run_ranks(1, find_kept_bytes, config, batch)
    assert with_layers - without == pytest.approx(kept, rel=0.1)


def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    make_with_layers(tmp_path, num=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"policy\.mtp\.num_layers: 2, but .* has 1 layers of multi-token prediction"):
        attach_layers(model, str(tmp_path), MtpConfig(num_layers=2), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"are not like the model's: model\.layers\.0\.mlp\.gate\.weight differs"):
        attach_layers(model, str(tmp_path), MtpConfig(num_layers=1), torch.float32)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"megatron_cfg": MEGATRON}, "policy.megatron_cfg.enabled"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True}}}, "adapters"),
        (
            {"dtensor_cfg": {"tensor_parallel_size": 2}, "trainers": 2},
            "policy.dtensor_cfg.tensor_parallel_size above 1",
        ),
        ({"algorithm": "dpo"}, "DPO"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    make_with_layers(tmp_path)
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **changes)
    assert f"policy.mtp.num_layers: 1, which cannot be combined with {complaint}" in str(refused.value)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "mixtral")
    with pytest.raises(
        ConfigError, match=r"policy\.mtp\.num_layers: 1, but these layers are known of .*not of mixtral"
    ):
        config_of(tmp_path)


def drafting_with(num_layers: int = 1, num_tokens: int = 2, **policy: Any) -> dict[str, Any]:
    """Return keys of a policy that vLLM drafts so many tokens for with so many trained layers."""
    arguments = {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_tokens}}
    generation = {"backend": "vllm", "vllm_kwargs": arguments, "vllm_cfg": {"max_model_len": 64}}
    return {"generation": generation, "mtp": {"num_layers": num_layers}, **policy}


def test_engines_that_draft_with_them_are_offered_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    names = make_with_layers(folder)
    config = make_config(folder, **drafting_with())
    (_, offered), *_ = run_ranks(1, train, config, tmp_path / "step_1", BATCHES[:1], None)
    of_layers = {name for name in offered if name.startswith("mtp.layers.0.")}
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    assert len(of_layers) == len([name for name in names if not name.endswith(copies)])
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.block.mlp.experts.7.up_proj.weight"} <= of_layers


@pytest.mark.parametrize(
    ("architecture", "num", "complaint"),
    [
        ("qwen3", 0, f"mtp, but such layers draft in {', '.join(MTP_DRAFTS)}, not in qwen3"),
        ("glm4_moe", 0, "mtp, but the model's config.json has no num_nextn_predict_layers"),
        ("glm4_moe", 1, "mtp drafts with 2 layers, but policy.mtp trains 1: refits would not bring all"),
    ],
)
def test_where_they_cannot_draft_is_said(architecture: str, num: int, complaint: str, tmp_path: Path) -> None:
    if num:
        make_with_layers(tmp_path, architecture, 2)
    else:
        make_model(tmp_path, architecture)
        described = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
        (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path, **drafting_with(num))
    assert f"policy.generation.vllm_kwargs.speculative_config: {complaint}" in str(refused.value)


def test_more_tokens_than_layers_are_a_multiple_of_them(tmp_path: Path) -> None:
    """vLLM refuses others when an engine starts."""
    make_with_layers(tmp_path, "glm4_moe", 2)
    for num_tokens in (1, 2, 4):
        make_config(tmp_path, **drafting_with(2, num_tokens))
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path, **drafting_with(2, 3))
    key = "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens"
    assert f"{key}: 3 is not a multiple of 2, the model's num_nextn_predict_layers" in str(refused.value)


class NoLoss:
    """A policy's loss without a gradient."""

    report = Report((), 1, torch.device("cpu"))

    def __call__(self, batch: MicroBatch, scores_BT: Any) -> torch.Tensor:
        return (scores_BT.logprobs * 0).sum()


Gradients = dict[str, NDArray[np.float32]]


def find_own_gradients(rank: int, config: Config, batch: MicroBatch) -> tuple[Gradients, list[float]]:
    """Return the gradients of the layers' loss alone, a sum over tokens, and the mean loss of each layer."""
    backend: Any = begin(rank, config)[0]
    policy = backend.policy
    policy._scorer.predicts = True
    scores = policy._scorer(batch)
    loss = MtpLoss(config, Counts(tokens=1, sequences=1), torch.device("cpu"))
    loss._policy_loss = NoLoss()
    torch.autograd.backward(loss(batch, scores))
    logprobs_BTD = scores.further_logprobs_BTD.detach()
    means = [-float(each.sum() / (each != 0).sum()) for each in logprobs_BTD.unbind(dim=2)]
    return {name: each.grad.numpy() for name, each in policy.parameters.items()}, means


def name_megatrons(tensors: dict[str, torch.Tensor], num: int) -> dict[str, torch.Tensor]:
    """Return the weights, or gradients, of a Qwen3 model with these layers by their names in Megatron-Core."""

    def name_layer(source: str, target: str) -> dict[str, torch.Tensor]:
        q, k, v = (tensors[f"{source}self_attn.{name}_proj.weight"].view(2, -1, 32) for name in "qkv")
        mlp = [tensors[f"{source}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        names = {
            "self_attention.linear_proj": "self_attn.o_proj",
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "mlp.linear_fc2": "mlp.down_proj",
        }
        return {
            f"{target}self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).flatten(0, 1),
            f"{target}mlp.linear_fc1.weight": torch.cat(mlp),
            **{f"{target}{name}.weight": tensors[f"{source}{own}.weight"] for name, own in names.items()},
        }

    named = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    for number in range(2):
        named |= name_layer(f"model.layers.{number}.", f"decoder.layers.{number}.")
    for number in range(num):
        source, target = f"model.layers.{2 + number}.", f"mtp.layers.{number}."
        named |= name_layer(source, f"{target}transformer_layer.")
        parts = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
        named |= {f"{target}{name}.weight": tensors[f"{source}{own}.weight"] for name, own in parts.items()}
    return named


def find_megatrons_gradients(
    rank: int, folder: Path, ids_BT: torch.Tensor, mask_BT: torch.Tensor, num: int
) -> tuple[Gradients, list[float]]:
    """Return the same of Megatron-Core's own `GPTModel`, with its own layers."""
    from tandem.trainer.backends.megatron import preparing

    preparing.prepare()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    described = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=num,
        mtp_loss_scaling_factor=FACTOR,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        described,
        layer,
        vocab_size=24,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(described, layer, use_transformer_engine=False),
    )
    parameters, tensors = dict(model.named_parameters()), name_megatrons(tensors_in(folder), num)
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    width = ids_BT.shape[1]
    labels_BT, counted_BT = ids_BT.roll(-1, dims=1), mask_BT.roll(-1, dims=1).float()
    counted_BT[:, -1] = 0
    future_TT = torch.triu(torch.ones(width, width, dtype=torch.bool), 1)
    positions_BT = torch.arange(width).expand_as(ids_BT)
    losses = model.train()(ids_BT, positions_BT, future_TT[None, None], labels=labels_BT, loss_mask=counted_BT)
    torch.autograd.backward((losses * 0).sum())
    means: list[float] = MTPLossLoggingHelper.tracker["values"].tolist()
    return {name: parameter.grad.numpy() for name, parameter in parameters.items()}, means


def test_losses_and_gradients_are_those_of_megatron_core(tmp_path: Path) -> None:
    num = 2
    folder = make_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    add_mtp_layers(folder, num)
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(3, 24, (3, 11), generator=generator)
    mask_BT = torch.rand(3, 11, generator=generator) < 0.6
    mask_BT[:, 0] = False
    plain = make_config(folder)
    mtp = MtpConfig(num_layers=num, loss_scaling_factor=FACTOR)  # for a family that no checkpoint has them of
    config = msgspec.structs.replace(plain, policy=msgspec.structs.replace(plain.policy, mtp=mtp))
    batch = MicroBatch(
        rows=(0, 1, 2),
        lengths_B=torch.full((3,), 11),
        token_ids_BT=ids_BT,
        attention_mask_BT=torch.ones_like(mask_BT),
        loss_mask_BT=mask_BT,
    )
    ((gradients, means),) = run_ranks(1, find_own_gradients, config, batch)
    ((expected, expected_means),) = run_ranks(1, find_megatrons_gradients, folder, ids_BT, mask_BT, num)
    assert means == pytest.approx(expected_means, abs=1e-5)
    renamed = {}
    for name, gradient in gradients.items():
        for number in range(num):
            name = name.replace(f"mtp.layers.{number}.block.", f"model.layers.{2 + number}.")
            name = name.replace(f"mtp.layers.{number}.norm.", f"model.layers.{2 + number}.shared_head.norm.")
            name = name.replace(f"mtp.layers.{number}.", f"model.layers.{2 + number}.")
        renamed[name] = torch.from_numpy(gradient)
    found = name_megatrons(renamed, num)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(found[name].numpy() - gradient).max() <= 1e-5 * np.abs(gradient).max(), name
