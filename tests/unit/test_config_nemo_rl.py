"""NeMo-RL v0.3's base files, key for key: known to the schema, and refused only for what is not built yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.config import load_config, to_plain
from tandem.common.errors import NotSupportedYet

CHECKPOINTING = """
checkpointing:
  enabled: true
  checkpoint_dir: "results/grpo"
  metric_name: "val_reward"
  higher_is_better: true
  keep_top_k: 3
  save_period: 10
"""

SHARED_POLICY = """
  fsdp_offload_enabled: false
  activation_checkpointing_enabled: false
  max_grad_norm: 1.0
  precision: "bfloat16"
  dynamic_batching:
    enabled: False
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
    sequence_length_round: 64
  dtensor_cfg:
    enabled: true
    cpu_offload: False
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    custom_parallel_plan: null
"""

MEGATRON = """
  megatron_cfg:
    enabled: false
    empty_unused_memory_level: 1
    activation_checkpointing: false
    converter_type: "Qwen2ForCausalLM"
    tensor_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    context_parallel_size: 1
    num_layers_in_first_pipeline_stage: null
    num_layers_in_last_pipeline_stage: null
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    freeze_moe_router: true
    moe_router_dtype: "fp64"
    moe_router_load_balancing_type: "none"
    moe_router_bias_update_rate: "1e-3"
    apply_rope_fusion: True
    optimizer:
      optimizer: "adam"
      lr: 5.0e-6
      min_lr: 5.0e-7
      weight_decay: 0.01
      bf16: true
      fp16: false
      params_dtype: "float32"
      adam_beta1: 0.9
      adam_beta2: 0.999
      adam_eps: '1e-8'
      sgd_momentum: 0.9
      use_distributed_optimizer: true
      use_precision_aware_optimizer: true
      clip_grad: ${policy.max_grad_norm}
    scheduler:
      start_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      end_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      weight_decay_incr_style: "constant"
      lr_decay_style: "constant"
      lr_decay_iters: null
      lr_warmup_iters: 13
      lr_warmup_init: 5.0e-7
    distributed_data_parallel_config:
      grad_reduce_in_fp32: false
      overlap_grad_reduce: true
      overlap_param_gather: true
      average_in_collective: true
      use_custom_fsdp: false
      data_parallel_sharding_strategy: "optim_grads_params"
"""

LOGGER = """
logger:
  log_dir: "logs"
  num_val_samples_to_print: 0
  wandb_enabled: false
  tensorboard_enabled: false
  mlflow_enabled: false
  monitor_gpus: true
  wandb:
    project: "dev"
    name: "dev-${data.dataset_name}"
  tensorboard: {}
  mlflow:
    experiment_name: "dev"
    run_name: "dev"
  gpu_monitoring:
    collection_interval: 10
    flush_interval: 10
cluster:
  gpus_per_node: 1
  num_nodes: 1
"""

GRPO_MATH_1B = f"""
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  max_val_samples: 256
  val_batch_size: 256
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  token_level_loss: true
{CHECKPOINTING}
policy:
  model_name: "Qwen/Qwen2.5-1.5B"
  tokenizer:
    name: ${{policy.model_name}}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  generation_batch_size: 32
  logprob_batch_size: 4
  max_total_sequence_length: 512
  make_sequence_length_divisible_by: ${{policy.dtensor_cfg.tensor_parallel_size}}
  sequence_packing:
    enabled: True
    train_mb_tokens: ${{mul:${{policy.max_total_sequence_length}}, ${{policy.train_micro_batch_size}}}}
    logprob_mb_tokens: ${{mul:${{policy.max_total_sequence_length}}, ${{policy.logprob_batch_size}}}}
    algorithm: "modified_first_fit_decreasing"
    sequence_length_round: 64
  optimizer:
    name: "torch.optim.AdamW"
    kwargs:
      lr: 5.0e-6
      weight_decay: 0.01
      betas: [0.9, 0.999]
      eps: '1e-8'
      foreach: False
      fused: False
  scheduler:
    - name: "torch.optim.lr_scheduler.LinearLR"
      kwargs:
        start_factor: 0.1
        end_factor: 1.0
        total_iters: 50
    - name: "torch.optim.lr_scheduler.ConstantLR"
      kwargs:
        factor: 1.0
        total_iters: 10000000000
    - milestones: [50]
  generation:
    backend: "vllm"
    max_new_tokens: ${{policy.max_total_sequence_length}}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    stop_token_ids: null
    stop_strings: null
    vllm_cfg:
      async_engine: false
      precision: ${{policy.precision}}
      tensor_parallel_size: 1
      pipeline_parallel_size: 1
      gpu_memory_utilization: 0.6
      max_model_len: ${{policy.max_total_sequence_length}}
      enforce_eager: False
    colocated:
      enabled: true
      resources:
        gpus_per_node: null
        num_nodes: null
{SHARED_POLICY}
  megatron_cfg:
    enabled: false
data:
  max_input_seq_length: ${{policy.max_total_sequence_length}}
  prompt_file: "examples/prompts/cot.txt"
  system_prompt_file: null
  dataset_name: "OpenMathInstruct-2"
env:
  math:
    num_workers: 8
{LOGGER}
"""

GRPO_MATH_1B_MEGATRON = f"""
defaults: "grpo_math_1B.yaml"
policy:
  generation_batch_size: 64
  logprob_batch_size: 8
  dtensor_cfg:
    enabled: false
  make_sequence_length_divisible_by: ${{policy.megatron_cfg.tensor_model_parallel_size}}
  optimizer: null
{MEGATRON.replace("enabled: false", "enabled: true", 1)}
logger:
  monitor_gpus: false
"""

SFT = f"""
sft:
  max_num_epochs: 1
  max_num_steps: 60
  val_period: 10
  val_batches: 8
  val_global_batch_size: 32
  val_micro_batch_size: 1
  val_at_start: true
  seed: 42
{CHECKPOINTING.replace("val_reward", "val_loss").replace("better: true", "better: false")}
policy:
  model_name: "meta-llama/Llama-3.2-1B"
  tokenizer:
    name: ${{policy.model_name}}
    chat_template: "{{% for message in messages %}}{{{{' Question: ' + message['content'].strip()}}}}{{% endfor %}}"
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  make_sequence_length_divisible_by: ${{policy.dtensor_cfg.tensor_parallel_size}}
  sequence_packing:
    enabled: False
  optimizer:
    name: "torch.optim.AdamW"
    kwargs: {{lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: '1e-5', foreach: False, fused: False}}
{SHARED_POLICY}
{MEGATRON}
data:
  max_input_seq_length: ${{policy.max_total_sequence_length}}
  dataset_name: "squad"
  add_bos: true
  add_eos: true
  add_generation_prompt: false
  add_system_prompt: false
{LOGGER.replace("tensorboard: {}", "tensorboard: {log_dir: 'tb_logs-sft-dev-${data.dataset_name}'}")}
"""

DPO = SFT.replace("sft:", "dpo:").replace(
    "  seed: 42",
    "  seed: 42\n  reference_policy_kl_penalty: 0.05\n  preference_average_log_probs: False\n"
    "  sft_average_log_probs: ${.preference_average_log_probs}\n  preference_loss_weight: 1\n  sft_loss_weight: 0",
)

GRPO_SLIDING_PUZZLE = """
defaults: "grpo_math_1B.yaml"
grpo:
  num_prompts_per_step: 32
  max_rollout_turns: 50
  max_num_steps: 10000
policy:
  model_name: "Qwen/Qwen2.5-1.5B-Instruct"
  max_total_sequence_length: 3072
  generation:
    temperature: 1.0
    top_p: 0.999
    top_k: 10000
data:
  add_system_prompt: false
env:
  sliding_puzzle_game:
    cfg:
      game_config:
        size: 5
        shuffle_moves: 15
      max_moves: 50
"""

FILES = {
    "grpo_math_1B.yaml": GRPO_MATH_1B,
    "grpo_math_1B_megatron.yaml": GRPO_MATH_1B_MEGATRON,
    "sft.yaml": SFT,
    "dpo.yaml": DPO,
    "grpo_sliding_puzzle.yaml": GRPO_SLIDING_PUZZLE,
}

REFUSED = {
    "grpo_math_1B.yaml": "policy.sequence_packing.enabled (true)",
    "grpo_math_1B_megatron.yaml": ("policy.megatron_cfg.enabled (true), policy.sequence_packing.enabled (true)"),
    "dpo.yaml": "algorithm (dpo)",
    "grpo_sliding_puzzle.yaml": "policy.sequence_packing.enabled (true)",
}

BUILT = ("policy.sequence_packing.enabled=false",)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_base_files_are_refused_only_for_what_is_not_built(folder: Path, name: str) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        load_config(name)
    assert str(caught.value) == f"{name}: not supported yet: {REFUSED[name]}"


def test_the_sft_file_runs_as_it_is(folder: Path) -> None:
    config = load_config("sft.yaml")
    assert config.algorithm == "sft"
    assert config.policy.tokenizer.name == "meta-llama/Llama-3.2-1B"
    assert config.policy.optimizer is not None
    assert config.policy.optimizer.kwargs["eps"] == 1e-5
    assert config.policy.megatron_cfg.moe_router_bias_update_rate == 1e-3
    assert config.policy.megatron_cfg.optimizer["adam_eps"] == 1e-8
    assert config.policy.megatron_cfg.pipeline_dtype == "bfloat16"
    assert config.logger.tensorboard.log_dir == "tb_logs-sft-dev-squad"
    assert config.checkpointing.higher_is_better is False


def test_the_grpo_file_runs_once_what_is_not_built_is_switched_off(folder: Path) -> None:
    config = load_config("grpo_math_1B.yaml", BUILT)
    assert config.algorithm == "grpo"
    assert config.policy.make_sequence_length_divisible_by == 1
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 4
    assert config.policy.generation.max_new_tokens == 512
    assert config.policy.scheduler[0].kwargs == {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}
    assert config.policy.scheduler[2].milestones == (50,)
    assert config.data.environment == "math"
    assert config.env["math"].num_workers == 8
    assert config.logger.wandb.name == "dev-OpenMathInstruct-2"


def test_the_megatron_file_keeps_keys_that_only_megatron_knows(folder: Path) -> None:
    overrides = [
        *BUILT,
        "policy.megatron_cfg.enabled=false",
        "policy.dtensor_cfg.enabled=true",
        "policy.optimizer={name: torch.optim.SGD}",
        "policy.megatron_cfg.moe_per_layer_logging=true",
    ]
    config = load_config("grpo_math_1B_megatron.yaml", overrides)
    assert config.policy.megatron_cfg.forwarded == {"moe_per_layer_logging": True}
    assert to_plain(config)["policy"]["megatron_cfg"]["moe_per_layer_logging"] is True
    assert config.policy.generation_batch_size == 64


def test_the_puzzle_is_made_as_its_environment_says(folder: Path) -> None:
    overrides = [*BUILT, "data.dataset_name=sliding_puzzle", "data.environment=sliding_puzzle_game"]
    config = load_config("grpo_sliding_puzzle.yaml", overrides)
    assert config.grpo.max_rollout_turns == 50
    assert config.data.task_params == {"size": 5, "shuffle_moves": 15}
    assert config.env["sliding_puzzle_game"].cfg["max_moves"] == 50
    assert config.policy.generation.top_k == 10000
