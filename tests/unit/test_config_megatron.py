"""What a configuration hands on to Megatron-Core: its own arguments, checked, and sizes that can be shared out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config, load_config, notices, unsupported
from tandem.config.checks.megatron import check_architecture_is_megatrons
from tandem.config.conform import conform
from tandem.config.installed import megatron_arguments, sources
from tandem.config.low_precision import list_products
from tandem.config.models import families
from tandem.config.problem import InvalidValue

SMALL = """
grpo: {}
policy:
  model_name: model
  optimizer: null
  dtensor_cfg: {enabled: false}
  megatron_cfg: {enabled: true}
data: {dataset_name: reasoning_gym, task: chain_sum}
cluster: {trainers: 1}
"""
KEY = "policy.megatron_cfg"
HAS_CORE = importlib.util.find_spec("megatron") is not None
CORE = f"Megatron-Core {importlib.metadata.version('megatron-core')}" if HAS_CORE else "Megatron-Core"
NEMO_RL = Path(__file__).parent / "nemo_rl"
MEGATRON_FILES = sorted(str(path.relative_to(NEMO_RL)) for path in NEMO_RL.rglob("*megatron*.yaml"))
MODELS = Path(__file__).parents[2] / "examples" / "models"
MODEL = {"model_type": "qwen3", "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def loaded(*overrides: str) -> Config:
    return load_config("small.yaml", overrides, to_run=False)


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix("command line: ").removeprefix("small.yaml: ")


def keep(folder: Path, config: dict[str, Any]) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))


def settings_module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tandem.trainer.backends.megatron import settings
    return settings


def settings_of() -> Any:
    return settings_module().settings_of


def classes() -> dict[str, type]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core's imports use what torch has deprecated
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import MLATransformerConfig
    return {
        "": MLATransformerConfig,
        "optimizer": OptimizerConfig,
        "distributed_data_parallel_config": DistributedDataParallelConfig,
    }


def test_arguments_are_those_of_the_classes_and_their_bases() -> None:
    for section, of_section in classes().items():
        fields = {field.name: field for field in dataclasses.fields(of_section) if "Callable" not in str(field.type)}
        known = megatron_arguments.list_arguments(section)
        assert known.keys() == {name for name in fields if name[0] != "_"}
        for name, wanted in known.items():
            default = fields[name].default
            if default == math.inf:
                continue  # for none, which no configuration says so
            # Some annotations do not admit the None that is the default.
            if isinstance(default, bool | int | float | str) or (
                default is None and "Optional" in str(fields[name].type)
            ):
                assert conform(default, wanted, name) == default


def test_reading_them_imports_no_torch() -> None:
    code = (
        "import sys; from tandem.config.installed.megatron_arguments import list_arguments;"
        "assert 'recompute_granularity' in list_arguments(''); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("recompute_granularty=full", f"{CORE} has no such argument; did you mean 'recompute_granularity'?"),
        ("tensor_parallel_size=2", f"{CORE} has no such argument; did you mean 'tensor_model_parallel_size'?"),
        ("recompute_granularity=fully", "'fully' is not one of full, selective; did you mean 'full'?"),
        ("moe_aux_loss_coeff=much", "expected a number, got 'much'"),
        ("recompute_modules=mlp", "expected a list of text, got 'mlp'"),
        ("attention_backend=flsh", "'flsh' is not one of auto, flash, fused, local, unfused; did you mean 'flash'?"),
        ("hidden_size=64", "cannot be set here: the model's config.json decides"),
        ("use_mup=true", "cannot be set here: the model's config.json decides"),
        ("experimental_attention_variant=dsa", "cannot be set here: the model's config.json decides"),
        ("mla_down_proj_fusion=true", "cannot be set here: Tandem sets it itself"),
        ("moe_single_grouped_weight=true", "cannot be set here: Tandem sets it itself"),
        ("gtp_weight_remat_size=2", "cannot be set here: Tandem sets it itself"),
        ("optimizer.grad_norm_skip_threshold=9.0", "cannot be set here: Tandem takes the steps itself"),
        ("optimizer.use_layer_wise_distributed_optimizer=true", "cannot be set here: its state cannot be saved"),
        ("bf16=true", "cannot be set here: set policy.precision instead"),
        ("variable_seq_lengths=true", "cannot be set here: Tandem sets it itself"),
        ("optimizer.adam_betas=[0.9,0.99]", f"{CORE} has no such argument; did you mean 'adam_beta2'?"),
        ("optimizer.lr=fast", "expected a number, got 'fast'"),
        (
            "optimizer.params_dtype=fp32",
            "'fp32' is not one of bfloat16, float16, float32",
        ),
        ("scheduler.lr_warmup_steps=3", "unknown key; did you mean 'lr_warmup_iters'?"),
        (
            "scheduler.lr_decay_style=cosin",
            "'cosin' is not one of WSD, constant, cosine, inverse-square-root, linear; did you mean 'cosine'?",
        ),
        ("distributed_data_parallel_config.bucket_size=1.5", "expected an integer, got 1.5"),
        (
            "distributed_data_parallel_config.overlap_grads=true",
            f"{CORE} has no such argument; did you mean 'overlap_grad_reduce'?",
        ),
    ],
)
def test_what_megatron_does_not_take_is_said_at_once(override: str, expected: str) -> None:
    assert error_of(f"{KEY}.{override}") == f"{KEY}.{override.partition('=')[0]}: {expected}"


def test_arguments_get_the_types_that_megatron_wants() -> None:
    megatron = loaded(
        f"{KEY}.recompute_granularity=selective",
        f"{KEY}.moe_aux_loss_coeff='1e-3'",
        f"{KEY}.distributed_data_parallel_config.bucket_size=4e7",
        f"{KEY}.optimizer={{lr: '1e-5', adam_eps: '1e-8', clip_grad: null}}",
        "policy.max_grad_norm=0.5",
    ).policy.megatron_cfg
    assert megatron.forwarded == {"recompute_granularity": "selective", "moe_aux_loss_coeff": 1e-3}
    (bucket_size,) = megatron.distributed_data_parallel_config.values()
    assert type(bucket_size) is int
    assert bucket_size == 40_000_000
    assert megatron.optimizer == {
        "lr": 1e-5,
        "min_lr": 0.0,
        "use_distributed_optimizer": True,
        "clip_grad": 0.5,
        "adam_eps": 1e-8,
    }
    assert loaded("policy.max_grad_norm=null").policy.megatron_cfg.optimizer["clip_grad"] == 0.0


def test_without_megatron_core_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "NOT_SUPPORTED_YET", ())
    monkeypatch.setattr(sources, "find_package", lambda name: None)
    megatron_arguments.list_arguments.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            load_config("small.yaml")
        assert str(caught.value) == (
            "small.yaml: policy.megatron_cfg.enabled: true, but Megatron-Core is not installed: "
            f"{install_command('megatron')}"
        )
        # NeMo-RL's files of Megatron-Core have no optimizer of torch, which only DTensor would need.
        with pytest.raises(ConfigError) as caught:
            load_config("small.yaml", ["policy.optimizer=null", "grpo.seed=x", f"{PIPELINE}=0"])
        assert {line.split(": ")[1] for line in caught.value.problems} == {"grpo.seed", PIPELINE, f"{KEY}.enabled"}
        # What is only planned may be planned anywhere.
        assert loaded(f"{KEY}.anything=1").policy.megatron_cfg.forwarded == {"anything": 1}
    finally:
        megatron_arguments.list_arguments.cache_clear()


@pytest.mark.parametrize(
    ("minor", "lacks", "expected"),
    [
        (19, "", ""),
        (15, "", "Megatron-Core 0.15.2 is installed, and known releases are 0.16, 0.17, 0.18, 0.19"),
        (20, "", "Megatron-Core 0.20.2 is installed, and known releases are 0.16, 0.17, 0.18, 0.19"),
        (17, "triton", ""),
        (18, "triton", "Megatron-Core 0.18.2 imports triton, which is not installed: pip install triton"),
    ],
)
def test_a_release_that_cannot_train_is_said_with_the_reason(
    minor: int, lacks: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unsupported, "NOT_SUPPORTED_YET", ())
    loaded()  # with the arguments of the release that is installed
    monkeypatch.setattr(sources, "find_package", lambda name: None if name == lacks else tmp_path)
    (tmp_path / "package_info.py").write_text(f'MAJOR = 0\nMINOR = {minor}\nPATCH = 2\nPRE_RELEASE = ""\n')
    assert megatron_arguments.find_obstacle() == (expected or None)
    if not expected:
        load_config("small.yaml")
        return
    with pytest.raises(ConfigError) as caught:
        load_config("small.yaml")
    assert str(caught.value) == f"small.yaml: policy.megatron_cfg.enabled: true, but {expected}"


def test_a_package_that_tells_no_release_is_left_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package_info.py").write_text("MAJOR, MINOR = 0, 19\n")
    monkeypatch.setattr(sources, "find_package", lambda name: tmp_path)
    assert megatron_arguments.find_release() is None
    assert megatron_arguments.find_obstacle() is None


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8: hybrid"),
        ({"fp4": "e2m1"}, "fp4: e2m1"),
        ({"fp8_cfg": {"enabled": True}}, "fp8_cfg.enabled: true"),
        ({"fp4_cfg": {"enabled": True}}, "fp4_cfg.enabled: true"),
    ],
)
def test_float8_is_not_left_out_in_silence(given: dict[str, Any], said: str) -> None:
    overrides = [f"{KEY}.{name}={json.dumps(value)}" for name, value in given.items()]
    with pytest.raises(ConfigError) as caught:
        load_config("small.yaml", overrides)
    assert str(caught.value).removeprefix("command line: ") == (
        f"{KEY}.{said} needs Transformer Engine, which is not installed here"
    )
    forwarded = {name: value for name, value in given.items() if not isinstance(value, dict)}
    assert loaded(*overrides).policy.megatron_cfg.forwarded == forwarded


def test_an_attention_that_transformer_engine_has_not_is_refused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("small.yaml", [f"{KEY}.attention_backend=local"])
    assert str(caught.value) == (
        f"command line: {KEY}.attention_backend: local is for layers without Transformer Engine, which is installed"
    )
    assert not notices(loaded(f"{KEY}.attention_backend=flash", f"{KEY}.tp_comm_overlap=true"))


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
@pytest.mark.parametrize("value", ["flash", "fused", "unfused", "local"])
def test_a_choice_among_kernels_that_are_not_installed_is_said_to_be_in_vain(value: str) -> None:
    found = notices(loaded(f"{KEY}.attention_backend={value}"))
    assert found == [
        f"{KEY}.attention_backend ({value}) has no effect: Transformer Engine is not installed here",
    ]
    assert not notices(loaded(f"{KEY}.attention_backend=auto"))


VIRTUAL = f"{KEY}.virtual_pipeline_model_parallel_size"
PIPELINE = f"{KEY}.pipeline_model_parallel_size"
TENSOR = f"{KEY}.tensor_model_parallel_size"
EXPERT = f"{KEY}.expert_model_parallel_size"
SCHEDULER = f"{KEY}.scheduler"
SGD = ["policy.optimizer={name: torch.optim.SGD}"]
FP8, FP4 = f"{KEY}.fp8_cfg.enabled=true", f"{KEY}.fp4_cfg.enabled=true"
FIVE_AT_THE_END = ("first_last_layers_bf16=true", "num_layers_at_end_in_bf16=5")
DELAYED = (
    "delayed takes scales from earlier passes in training, of which a pass that scores has none: choose blockwise, "
    "tensorwise or mxfp8"
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{KEY}.optimizer.lr=null"], f"{KEY}.optimizer.lr: required: the highest learning rate"),
        (
            [f"{KEY}.optimizer={{lr: 1e-6, min_lr: 1e-5}}"],
            f"{KEY}.optimizer.min_lr: 1e-05 is greater than {KEY}.optimizer.lr (1e-06)",
        ),
        (
            [f"{SCHEDULER}.lr_warmup_init=1"],
            f"{SCHEDULER}.lr_warmup_init: 1 is greater than {KEY}.optimizer.lr (5e-06)",
        ),
        (
            [f"{SCHEDULER}.lr_decay_iters=9", f"{SCHEDULER}.lr_warmup_iters=9"],
            f"{SCHEDULER}.lr_decay_iters: 9 is no more than {SCHEDULER}.lr_warmup_iters (9)",
        ),
        (
            [f"{SCHEDULER}.lr_decay_style=WSD"],
            f"{SCHEDULER}.lr_wsd_decay_iters: required where lr_decay_style is WSD",
        ),
        (
            [f"{SCHEDULER}.end_weight_decay=0.1"],
            f"{SCHEDULER}.end_weight_decay: 0.1 differs from the start (0.01), but weight_decay_incr_style is constant",
        ),
        ([f"{VIRTUAL}=2"], f"{VIRTUAL}: 2, but {PIPELINE} is 1: there are no stages to interleave"),
        (
            [f"{KEY}.pipeline_dtype=float32"],
            f"{KEY}.pipeline_dtype: float32 is not policy.precision (bfloat16), nor null",
        ),
        ([f"{KEY}.optimizer.fp16=true"], f"{KEY}.optimizer.fp16: true, but policy.precision is bfloat16"),
        ([f"{KEY}.optimizer.optimizer=adamw"], f"{KEY}.optimizer.optimizer: 'adamw' is not one of adam, sgd"),
        (
            [f"{KEY}.optimizer={{optimizer_cpu_offload: true}}", "checkpointing.enabled=true"],
            f"{KEY}.optimizer.optimizer_cpu_offload: true, but its state cannot be saved (checkpointing.enabled)",
        ),
        (
            [
                f"{KEY}.optimizer={{optimizer_cpu_offload: true, use_distributed_optimizer: true}}",
                "checkpointing.enabled=false",
                "policy.precision=float32",
            ],
            f"{KEY}.optimizer.optimizer_cpu_offload: true, but in float32 it needs "
            f"{KEY}.optimizer.use_distributed_optimizer off",
        ),
        (
            [f"{KEY}.optimizer={{use_precision_aware_optimizer: true, use_distributed_optimizer: false}}"],
            f"{KEY}.optimizer.use_precision_aware_optimizer: true, but it needs {KEY}.optimizer.optimizer adam and "
            "use_distributed_optimizer",
        ),
        (
            [f"{KEY}.optimizer.exp_avg_dtype=bfloat16"],
            f"{KEY}.optimizer.exp_avg_dtype: bfloat16 needs {KEY}.optimizer.use_precision_aware_optimizer",
        ),
        ([f"{KEY}.recompute_num_layers=1"], f"{KEY}.recompute_num_layers: needs {KEY}.recompute_granularity"),
        (
            [f"{KEY}.recompute_granularity=full", f"{KEY}.recompute_num_layers=1"],
            f"{KEY}.recompute_method: required where {KEY}.recompute_granularity is full",
        ),
        (
            [f"{KEY}.recompute_granularity=selective", f"{KEY}.recompute_num_layers=1"],
            f"{KEY}.recompute_num_layers: 1, but {KEY}.recompute_granularity is selective",
        ),
        (
            [f"{KEY}.distributed_data_parallel_config.use_custom_fsdp=true"],
            f"{KEY}.distributed_data_parallel_config.use_custom_fsdp: true is not supported: "
            f"{KEY}.optimizer.use_distributed_optimizer shards, and so does dtensor_cfg",
        ),
        ([FP8, f"{KEY}.fp8=hybrid"], f"{KEY}.fp8: hybrid, but {KEY}.fp8_cfg is enabled: set it there"),
        ([FP8, f"{KEY}.fp8_recipe=mxfp8"], f"{KEY}.fp8_recipe: mxfp8, but {KEY}.fp8_cfg is enabled: set it there"),
        ([FP4, f"{KEY}.fp4=e2m1"], f"{KEY}.fp4: e2m1, but {KEY}.fp4_cfg is enabled: set it there"),
        ([FP8, FP4], f"{KEY}.fp4_cfg.enabled: true, but {KEY}.fp8_cfg.enabled is true"),
        ([FP8, f"{KEY}.fp4=e2m1"], f"{KEY}.fp4: e2m1, but {KEY}.fp8_cfg.enabled is true"),
        ([f"{KEY}.fp8_cfg={{enabled: true, fp8_recipe: delayed}}"], f"{KEY}.fp8_cfg.fp8_recipe: {DELAYED}"),
        ([f"{KEY}.fp8=hybrid"], f"{KEY}.fp8_recipe: {DELAYED}"),
        (
            [f"{KEY}.fp8_cfg={{enabled: true, fp8_recipe: custom}}"],
            f"{KEY}.fp8_quantizer_factory: required where {KEY}.fp8_cfg.fp8_recipe is custom",
        ),
        (
            [f"{KEY}.fp4=e2m1", f"{KEY}.fp4_recipe=custom"],
            f"{KEY}.fp4_quantizer_factory: required where {KEY}.fp4_recipe is custom",
        ),
        (
            [FP4, "policy.precision=float32"],
            f"{KEY}.fp4_cfg.enabled: true needs policy.precision bfloat16, not float32",
        ),
        (
            [FP8, f"{KEY}.distributed_data_parallel_config.fp8_param_gather=true"],
            f"{KEY}.distributed_data_parallel_config.fp8_param_gather: true is for weights in float8, which is not "
            "supported",
        ),
        (
            [FP8, f"{KEY}.optimizer.fp8_recipe=mxfp8"],
            f"{KEY}.optimizer.fp8_recipe: 'mxfp8' is for weights in float8, which is not supported",
        ),
        (
            [f"{KEY}.moe_router_padding_for_quantization=true"],
            f"{KEY}.moe_router_padding_for_quantization: true, but neither {KEY}.fp8_cfg nor {KEY}.fp4_cfg is enabled",
        ),
        (
            [f"{KEY}.fp8_cfg.fp8_recipe=rowwise"],
            f"{KEY}.fp8_cfg.fp8_recipe: 'rowwise' is not one of blockwise, custom, delayed, mxfp8, tensorwise; "
            "did you mean 'blockwise'?",
        ),
    ],
)
def test_rules(overrides: list[str], expected: str) -> None:
    assert error_of(*overrides) == expected


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (
            {},
            ["cluster.trainers=6", f"{TENSOR}=2", f"{PIPELINE}=2"],
            f"cluster.trainers: 6 is not a multiple of 4, the product of {TENSOR} (2), "
            "pipeline_model_parallel_size (2)",
        ),
        (
            {},
            ["cluster.trainers=8", f"{TENSOR}=2", "policy.train_micro_batch_size=256"],
            "policy.train_global_batch_size: 512 is not a multiple of policy.train_micro_batch_size * the "
            "data-parallel size = 256 * 4 = 1024",
        ),
        ({}, ["cluster.trainers=3", f"{TENSOR}=3"], f"{TENSOR}: 3 does not divide 8 attention heads"),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 6},
            ["cluster.trainers=4", f"{TENSOR}=4"],
            f"{TENSOR}: 4 is neither a divisor nor a multiple of 6 key-value heads",
        ),
        (
            {},
            ["cluster.trainers=8", f"{PIPELINE}=8"],
            f"{PIPELINE}: 12 layers do not make 8 even stages; num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage make the ends different",
        ),
        (
            {},
            ["cluster.trainers=4", f"{PIPELINE}=4", f"{VIRTUAL}=2"],
            f"{PIPELINE}: 12 layers do not make 4 even stages of 2 virtual stages each; "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage make the ends different",
        ),
        (
            {},
            ["cluster.trainers=4", f"{PIPELINE}=4", f"{KEY}.num_layers_in_first_pipeline_stage=1"],
            f"{PIPELINE}: 12 layers do not make 4 even stages with [1] in the first or last; "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage make the ends different",
        ),
        ({}, ["cluster.trainers=2", f"{EXPERT}=2"], f"{EXPERT}: 2, but the model has no experts"),
        (
            {},
            ["cluster.trainers=4", f"{PIPELINE}=4", FP8, *(f"{KEY}.{key}" for key in FIVE_AT_THE_END)],
            f"{KEY}.num_layers_at_end_in_bf16: 5 is not between 0 and 3, the layers of a pipeline stage",
        ),
        ({"num_experts": 8}, ["cluster.trainers=3", f"{EXPERT}=3"], f"{EXPERT}: 3 does not divide 8 experts"),
        (
            {"num_experts": 8},
            ["cluster.trainers=4", f"{EXPERT}=8"],
            f"{EXPERT}: 8 * expert_tensor_parallel_size (1) does not divide the 4 trainers of a pipeline stage",
        ),
    ],
)
def test_what_cannot_be_shared_out(here: Path, config: dict[str, Any], overrides: list[str], expected: str) -> None:
    keep(here, {**MODEL, **config})
    assert error_of("policy.train_global_batch_size=512", "policy.train_micro_batch_size=1", *overrides) == expected


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({}, ["cluster.trainers=8", f"{TENSOR}=8"]),  # twice as many ranks as keys and values
        ({}, ["cluster.trainers=4", f"{PIPELINE}=2", f"{VIRTUAL}=3"]),
        (
            {"num_hidden_layers": 10},
            [
                "cluster.trainers=4",
                f"{PIPELINE}=4",
                f"{KEY}.num_layers_in_first_pipeline_stage=2",
                f"{KEY}.num_layers_in_last_pipeline_stage=2",
            ],
        ),
        ({"num_experts": 8}, ["cluster.trainers=4", f"{EXPERT}=4", f"{TENSOR}=2", f"{KEY}.sequence_parallel=true"]),
        ({}, ["cluster.trainers=4", f"{PIPELINE}=4", FP4, *(f"{KEY}.{key}" for key in FIVE_AT_THE_END)]),
        ({}, [FP8, f"{KEY}.first_last_layers_bf16=true", f"{KEY}.num_layers_at_end_in_bf16=4"]),
        ({}, [f"{KEY}.fp8_cfg.enabled=false", f"{KEY}.fp8=hybrid", f"{KEY}.fp8_recipe=mxfp8"]),
    ],
)
def test_what_can(here: Path, config: dict[str, Any], overrides: list[str]) -> None:
    keep(here, {**MODEL, **config})
    loaded("policy.train_micro_batch_size=1", *overrides)


def test_sizes_of_a_model_that_is_elsewhere_go_unchecked() -> None:
    loaded("cluster.trainers=16", f"{PIPELINE}=16", "policy.train_micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], []),
        (
            ["policy.dtensor_cfg.enabled=true"],
            [f"policy.dtensor_cfg.enabled (true) has no effect: {KEY}.enabled is true, and wins"],
        ),
        (
            SGD,
            [f"policy.optimizer (torch.optim.SGD) has no effect: {KEY}.optimizer decides"],
        ),
        (
            ["policy.scheduler={name: torch.optim.lr_scheduler.ConstantLR}"],
            [f"policy.scheduler has no effect: {KEY}.scheduler decides"],
        ),
        (
            [f"{KEY}.sequence_parallel=true"],
            [f"{KEY}.sequence_parallel (true) has no effect: {TENSOR} is 1"],
        ),
        (
            [
                f"{KEY}.enabled=false",
                "policy.dtensor_cfg={enabled: true, sequence_parallel: true}",
                "policy.optimizer={}",
            ],
            ["policy.dtensor_cfg.sequence_parallel (true) has no effect: policy.dtensor_cfg.tensor_parallel_size is 1"],
        ),
        (
            [f"{KEY}.moe_token_dispatcher_type=allgather"],
            [f"{KEY}.moe_token_dispatcher_type (allgather) is taken as alltoall: micro-batches have different lengths"],
        ),
        (
            [f"{KEY}.converter_type=LlamaForCausalLM"],
            [f"{KEY}.converter_type (LlamaForCausalLM) has no effect: the model's config.json decides"],
        ),
        (  # NeMo-RL v0.7's recipe of Nemotron 3 Nano
            [f"{SCHEDULER}.lr_warmup_init=2e-65"],
            [f"{SCHEDULER}.lr_warmup_init (2e-65) counts as 0: the run computes in float32"],
        ),
        (
            ["data.max_input_seq_length=9000"],
            [
                "data.max_input_seq_length (9000) has no effect: policy.max_total_sequence_length is 512, and a longer "
                "prompt is left out",
            ],
        ),
        (
            [f"{KEY}.optimizer.bf16=false", f"{KEY}.optimizer.clip_grad=2"],
            [
                f"{KEY}.optimizer.bf16 (false) has no effect: policy.precision (bfloat16) decides",
                f"policy.max_grad_norm (1.0) has no effect: {KEY}.optimizer.clip_grad is 2",
            ],
        ),
        (
            [
                f"{KEY}.distributed_data_parallel_config.average_in_collective=true",
                f"{KEY}.distributed_data_parallel_config.overlap_param_gather=true",
                f"{KEY}.distributed_data_parallel_config.data_parallel_sharding_strategy=optim_grads_params",
            ],
            [
                f"{KEY}.distributed_data_parallel_config.average_in_collective (true) has no effect: gradients are "
                "summed, since the loss is already a mean",
                f"{KEY}.distributed_data_parallel_config.overlap_param_gather (true) has no effect: weights are read "
                "as soon as a step is over",
                f"{KEY}.distributed_data_parallel_config.data_parallel_sharding_strategy (optim_grads_params) has no "
                "effect: use_megatron_fsdp is off",
            ],
        ),
        (
            ["cluster.num_nodes=2"],
            [
                "cluster.address (tcp://127.0.0.1:*) cannot be reached from the other node: name this one's, "
                "tcp://HOST:PORT"
            ],
        ),
    ],
)
def test_what_has_no_effect_is_said(overrides: list[str], expected: list[str]) -> None:
    assert notices(loaded(*overrides)) == expected


def test_experts_split_sequences_where_layers_are_split(here: Path) -> None:
    keep(here, {**MODEL, "num_experts": 8})
    overrides = ["cluster.trainers=2", "policy.train_micro_batch_size=1", f"{TENSOR}=2"]
    assert notices(loaded(*overrides)) == [
        f"{KEY}.sequence_parallel (false) is taken as true: the model has experts, and {TENSOR} is 2"
    ]
    assert notices(loaded(*overrides, f"{KEY}.sequence_parallel=true")) == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Megatron-Core, about its own defaults
@pytest.mark.parametrize("name", MEGATRON_FILES)
def test_megatron_core_takes_what_nemo_rl_says(name: str) -> None:
    """Its own classes check themselves when they are made, for models of the sizes that the files are for."""
    model = "Qwen3-30B-A3B" if "30ba3b" in name else "Llama-3.1-70B" if "70" in name else "Llama-3.1-8B"
    folder = MODELS / model
    config = load_config(NEMO_RL / name, [f"policy.model_name={folder}"], to_run=False)
    made = settings_of()(config, json.loads((folder / "config.json").read_text()), config.cluster.trainers)
    megatron = config.policy.megatron_cfg
    assert made.transformer.tensor_model_parallel_size == megatron.tensor_model_parallel_size
    assert made.transformer.pipeline_model_parallel_size == megatron.pipeline_model_parallel_size
    assert made.sizes.dp == config.data_parallel_size
    assert (made.optimizer.lr, made.optimizer.clip_grad) == (megatron.optimizer["lr"], megatron.optimizer["clip_grad"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_forwarded_arrives() -> None:
    given = {
        "recompute_granularity": "selective",
        "activation_checkpointing": "true",
        "attention_backend": "unfused",
        "moe_aux_loss_coeff": "1e-3",
        "optimizer.exp_avg_dtype": "float32",
    }
    folder = MODELS / "Qwen3-30B-A3B"
    config = loaded(f"policy.model_name={folder}", *(f"{KEY}.{key}={value}" for key, value in given.items()))
    made = settings_of()(config, json.loads((folder / "config.json").read_text()), 1)
    assert made.transformer.recompute_granularity == "selective"
    assert made.transformer.recompute_num_layers is None
    assert made.transformer.attention_backend.name == "unfused"
    assert made.transformer.moe_aux_loss_coeff == 1e-3
    assert str(made.optimizer.exp_avg_dtype) == "torch.float32"


SECTIONS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (
        {"fp8_cfg": {"enabled": True}},
        {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "fp4": None},
        128,
    ),
    (
        {"fp8_cfg": {"enabled": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8_wgrad": False},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": False, "fp8_wgrad": False},
        16,
    ),
    (
        {"fp8_cfg": {"enabled": True, "fp8_recipe": "mxfp8"}, "first_last_layers_bf16": True},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1},
        32,
    ),
    (
        {"fp4_cfg": {"enabled": True}},
        {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": False},
        128,
    ),
    ({"fp4": "e2m1"}, {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": False}, 128),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 16),
    (
        {"fp8_cfg": {"enabled": True, "fp8_recipe": "custom"}, "fp8_quantizer_factory": "own.module.make"},
        {"fp8": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "own.module.make"},
        128,
    ),
    ({}, {"fp8": None, "fp8_recipe": "delayed", "fp8_param": False, "fp4": None, "fp4_recipe": "nvfp4"}, 0),
    (
        {"fp8_cfg": {"enabled": False}, "fp4_cfg": {"enabled": False}},
        {"fp8": None, "fp8_recipe": "delayed", "fp8_param": False, "fp4": None},
        0,
    ),
]
"""What a section says of products of fewer bits, what Megatron-Core gets of it, and the tokens that kernels take."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("given", "expected", "tokens"), SECTIONS)
def test_products_of_fewer_bits_are_megatron_cores(
    given: dict[str, Any], expected: dict[str, Any], tokens: int
) -> None:
    """Its own class takes them. No layer is made of them here, without Transformer Engine."""
    settings = settings_module()
    folder = MODELS / "Llama-3.1-8B"
    model = json.loads((folder / "config.json").read_text())
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
    overrides = [f"{KEY}.{key}={json.dumps(value)}" for key, value in {**sizes, **given}.items()]
    config = loaded(f"policy.model_name={folder}", "cluster.trainers=4", "policy.train_micro_batch_size=1", *overrides)
    said: list[str] = []
    made = settings.transformer_of(config.policy, model, said)
    assert {name: getattr(made, name) for name in expected} == expected
    assert not said
    products = list_products(config.policy.megatron_cfg)
    shares = 4 * 2  # two chunks for each of two ranks, each split over two ranks
    assert settings.row_divisor_of(products, made) == (tokens * shares if tokens else 1)
    plain = loaded(
        f"policy.model_name={folder}", "cluster.trainers=4", "policy.train_micro_batch_size=1", *overrides[:3]
    )
    without = settings.transformer_of(plain.policy, model, [])
    values = {name: value for name, value in vars(made).items() if not callable(value)}  # which are made anew
    differs = {name for name, value in values.items() if value != getattr(without, name)}
    assert differs == {name for name, value in expected.items() if value != getattr(without, name)}


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
@pytest.mark.parametrize(("name", "place"), [("policy", "policy"), ("reference", "policy")])
def test_a_trainer_without_their_kernels_does_not_start(name: str, place: str) -> None:
    config = loaded(FP8)
    with pytest.raises(ModelError) as caught:
        settings_module().settings_of(config, MODEL, 1, name)
    assert str(caught.value) == (
        f"{place}.megatron_cfg.fp8_cfg.enabled: true needs Transformer Engine, which is not installed here"
    )


@pytest.mark.parametrize(
    ("given", "capability", "expected"),
    [
        ("fp8_cfg={enabled: true}", None, "fp8_cfg.enabled: true needs a GPU"),
        (
            "fp8_cfg={enabled: true, fp8_recipe: tensorwise}",
            (8, 0),
            "fp8_cfg.enabled: true needs a GPU of compute capability 8.9 for tensorwise; this one has 8.0",
        ),
        (
            "fp8_cfg={enabled: true}",
            (8, 9),
            "fp8_cfg.enabled: true needs a GPU of compute capability 9.0 for blockwise; this one has 8.9",
        ),
        (
            "fp8_cfg={enabled: true, fp8_recipe: mxfp8}",
            (9, 0),
            "fp8_cfg.enabled: true needs a GPU of compute capability 10.0 for mxfp8; this one has 9.0",
        ),
        (
            "fp4=e2m1",
            (9, 0),
            "fp4: e2m1 needs a GPU of compute capability 10.0 for nvfp4; this one has 9.0",
        ),
        ("fp8_cfg={enabled: true}", (9, 0), None),
        ("fp4_cfg={enabled: true}", (10, 0), None),
    ],
)
def test_each_recipe_has_its_gpus(given: str, capability: tuple[int, int] | None, expected: str | None) -> None:
    settings = settings_module()
    (products,) = list_products(loaded(f"{KEY}.{given}").policy.megatron_cfg)
    if expected is None:
        settings.require_kernels("policy.megatron_cfg.", products, True, capability)
        return
    with pytest.raises(ModelError) as caught:
        settings.require_kernels("policy.megatron_cfg.", products, True, capability)
    assert str(caught.value) == f"policy.megatron_cfg.{expected}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp8_cfg={enabled: true, fp8_param: true}", "fp8_cfg.fp8_param (true)"),
        ("fp4_cfg={enabled: true, fp4_param: true}", "fp4_cfg.fp4_param (true)"),
    ],
)
def test_weights_are_not_kept_in_fewer_bits(given: str, expected: str) -> None:
    config = loaded(f"{KEY}.{given}")
    assert unsupported.describe_refusal(config) == f"not supported yet: {KEY}.{expected}"
    assert unsupported.describe_refusal(loaded(f"{KEY}.{given.replace('enabled: true', 'enabled: false')}")) is None


def test_every_type_that_megatron_core_does_not_compute_is_refused_by_name(here: Path) -> None:
    """Hybrid stacks among them: its Mamba layers and gated delta nets have kernels for GPUs alone."""
    page = (MODELS.parents[1] / "docs" / "models.md").read_text().partition("<!-- types -->")[2]
    others = [name for name in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) if name not in families.MEGATRON]
    assert {"nemotron_h", "qwen3_next", "qwen3_5_moe_text", "falcon_h1", "bamba", "kimi_linear"} <= {*others}
    keep(here, MODEL)
    config, known = loaded(), ", ".join(families.MEGATRON)
    for name in others:
        (here / "model" / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(InvalidValue, match=f"Megatron-Core trains {known} here, not {name}$") as caught:
            check_architecture_is_megatrons(config)
        assert caught.value.key == f"{KEY}.enabled"
    assert f"{KEY}.enabled: true, but Megatron-Core trains {known} here, not {name}" in error_of()
