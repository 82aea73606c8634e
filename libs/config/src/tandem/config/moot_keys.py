"""Keys of NeMo-RL's files that something else decides here: accepted, with a notice if they are set."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.config.schema import MODELS, Config
from tandem.config.schema.declarations import ALGORITHMS


class MootKey(msgspec.Struct, frozen=True):
    """A key in NeMo-RL's files that something else decides here."""

    key: str
    off: tuple[Any, ...]
    """Neutral values."""
    reason: str


_STEPPING = "with colocated generation, the optimizer's state is on the device only during a training step"
_ALL_SAVED = "a checkpoint always has the optimizer's state, so that a run resumes exactly"
_FREE_PORTS = "the system chooses free ports"
MODEL_ARGUMENTS = "policy.dtensor_cfg.automodel_kwargs"
_PLANNED = "the plan of the refit chooses how each piece travels"
_OF_NEMO_GYM = "only NeMo Gym's rollouts have penalties"
_ONE_TEACHER = "each sample has one teacher"
_SAME_TOKENS = "every teacher has the policy's tokens"
_AS_THEY_COME = "engines take validation problems as they have room"
_ADVANTAGES = "advantages of samples are computed by the coordinator, those of tokens by trainers"
_REPLACEMENTS = "cluster.max_replacements decides"
_ALWAYS_AS_FAR = "engines are ahead by up to max_trajectory_age_steps, whatever is trained"
_OF_ROLLOUT_LOG = "a resumed run generates what its rollout log lacks"
MOOT = (
    MootKey("grpo.val_batch_size", (256,), _AS_THEY_COME),
    MootKey("ppo.val_batch_size", (256,), _AS_THEY_COME),
    MootKey("distillation.val_batch_size", (64,), _AS_THEY_COME),
    MootKey("grpo.calculate_advantages_on_gpu", (False,), _ADVANTAGES),
    MootKey("ppo.calculate_advantages_on_gpu", (False,), _ADVANTAGES),
    MootKey("distillation.calculate_advantages_on_gpu", (False,), "distillation has no advantages"),
    MootKey("grpo.penalize_invalid_tool_call", (None, False), "grpo.invalid_tool_call_advantage replaces it"),
    MootKey("grpo.penalize_malformed_thinking", (None, False), "grpo.malformed_thinking_advantage replaces it"),
    MootKey("grpo.invalid_tool_call_strategy", (None, ""), "grpo.invalid_tool_call_advantage replaces it"),
    MootKey("data.num_workers", (None, 0, 1), "data is read once, before the run begins"),
    MootKey("grpo.async_grpo.max_generation_failures", (0,), _REPLACEMENTS),
    MootKey("ppo.async_ppo.max_generation_failures", (0,), _REPLACEMENTS),
    MootKey("ppo.async_ppo.warmup_max_trajectory_age_steps", (None,), _ALWAYS_AS_FAR),
    MootKey("ppo.async_ppo.warmup_generation_lead_steps", (None,), _ALWAYS_AS_FAR),
    MootKey("ppo.async_ppo.drop_incomplete_targets_on_restore", (False,), _OF_ROLLOUT_LOG),
    MootKey("loss_fn.kd_loss_mode", ("sum",), _ONE_TEACHER),
    MootKey("loss_fn.normalize_teacher_by_vocab", (False,), _SAME_TOKENS),
    MootKey("loss_fn.sum_weights_metric", (None,), _ONE_TEACHER),
    MootKey("loss_fn.alpha", (1.0,), _ONE_TEACHER),
    MootKey("loss_fn.exact_token_match_only", (False,), _SAME_TOKENS),
    MootKey("loss_fn.uncommon_topk", (8192,), _SAME_TOKENS),
    MootKey("reward_penalties.penalize_duplicated_reasoning", (False,), _OF_NEMO_GYM),
    MootKey("reward_penalties.penalize_empty_final_answer", (False,), _OF_NEMO_GYM),
    MootKey("reward_penalties.penalize_unwanted_tokens", (False,), _OF_NEMO_GYM),
    MootKey("reward_penalties.penalize_malformed_think_tag", (False,), _OF_NEMO_GYM),
    MootKey("logger.gpu_monitoring.flush_interval", (10.0,), "readings are written with each step"),
    MootKey("policy.sequence_packing.microbatch_order", (None, "packer"), "rows are in the packer's order"),
    MootKey("checkpointing.save_optimizer", (True,), _ALL_SAVED),
    MootKey("checkpointing.save_consolidated", (False,), "checkpoints are in Hugging Face's layout"),
    MootKey("checkpointing.model_save_format", (None, "safetensors"), "checkpoints are safetensors"),
    MootKey("policy.dtensor_cfg.model_save_format", (None, "safetensors"), "checkpoints are safetensors"),
    MootKey("policy.dtensor_cfg.save_consolidated", (None, "false"), "checkpoints are in Hugging Face's layout"),
    MootKey("cluster.segment_size", (None,), "the launcher of the nodes chooses them (docs/clusters.md)"),
    MootKey("cluster.master_port_range_low", (None,), _FREE_PORTS),
    MootKey("cluster.master_port_range_high", (None,), _FREE_PORTS),
    MootKey("policy.generation.port_range_low", (None,), _FREE_PORTS),
    MootKey("policy.generation.port_range_high", (None,), _FREE_PORTS),
    MootKey("data_plane.enabled", (None, False), "samples always go straight from engines to trainers"),
    MootKey("policy.logprob_chunk_size", (None,), "policy.logprob_batch_size decides"),
    MootKey("policy.offload_optimizer_for_logprob", (False,), _STEPPING),
    MootKey("policy.refit_buffer_size_gb", (None,), "weights go straight to engines, through buffers of a few MB"),
    MootKey("policy.dtensor_cfg._v2", (True,), "there is one DTensor backend"),
    MootKey(MODEL_ARGUMENTS, ({},), "transformers loads models"),
    MootKey("policy.dtensor_cfg.moe_parallelizer", (None, {}), "transformers loads models"),
    MootKey("policy.dtensor_cfg.clear_cache_every_n_steps", (None,), "torch's own cache is left alone within a step"),
    MootKey(
        "policy.megatron_cfg.empty_unused_memory_level", (0, 1), "memory is freed around colocated generation alone"
    ),
    MootKey("policy.megatron_cfg.defer_fp32_logits", (None, False), "logits become float32 row by row"),
    MootKey("policy.megatron_cfg.scheduler.override_opt_param_scheduler", (None, True), "these keys always decide"),
    MootKey("policy.megatron_cfg.use_linear_ce_fusion_loss", (False,), "it only changes the use of memory"),
    MootKey("policy.megatron_cfg.moe_router_enable_expert_bias", (None,), "the model's config.json decides"),
    MootKey(
        "policy.megatron_cfg.moe_grouped_gemm", (None, True), "experts are multiplied at once wherever they can be"
    ),
    MootKey("policy.megatron_cfg.mtp_num_layers", (None, 0), "layers that predict later tokens are not built or saved"),
    MootKey("policy.megatron_cfg.train_iters", (None,), "scheduler.lr_decay_iters and the run's length decide"),
    MootKey("policy.megatron_cfg.track_moe_metrics", (None, False), "step metrics do not cover experts"),
    MootKey("policy.generation.use_async_rollouts", (None,), "policy.generation.async_engine decides"),
    MootKey("policy.generation.vllm_cfg.enable_expert_parallel", (None,), "expert_parallel_size beside it decides"),
    MootKey("policy.generation.vllm_cfg.enable_prefix_caching", (None,), "samples of one prompt share keys and values"),
    MootKey(
        "policy.generation.vllm_cfg.limit_mm_per_prompt.image",
        (None,),
        "the tokens of a prompt's images limit their number",
    ),
    MootKey(
        "policy.generation.vllm_cfg.skip_tokenizer_init", (None, True), "vLLM has no tokenizer and is given tokens"
    ),
    MootKey(
        "policy.generation.vllm_cfg.vllm_metrics_logger_interval", (None,), "each step has the metrics of its engines"
    ),
    MootKey("policy.generation.vllm_cfg.use_tqdm", (None, False), "the run has a progress line of its own"),
    MootKey("policy.generation.vllm_cfg.use_deep_gemm", (False,), "vLLM chooses its kernels"),
    MootKey("policy.generation.vllm_cfg.env_vars", (None, {}), "engines inherit the environment of the run"),
    MootKey(
        "policy.generation.vllm_cfg.distributed_executor_backend", (None,), "rollout processes start their workers"
    ),
    MootKey(
        "policy.generation.vllm_cfg.http_server_serving_chat_kwargs",
        (None, {}),
        "policy.generation.expose_http_server and tool_call_parser decide",
    ),
    MootKey("policy.generation.vllm_cfg.reasoning_parser_plugin", (None,), "the server is not vLLM's"),
    MootKey("policy.generation.vllm_cfg.tool_parser_plugin", (None,), "the server is not vLLM's"),
    MootKey("policy.generation.refit_transport", (None,), _PLANNED),
    MootKey("policy.generation.refit_cfg", (None, {}), _PLANNED),
    MootKey(
        "policy.generation.vllm_cfg.logprobs_mode",
        (None, "processed_logprobs"),
        "log-probabilities are those that tokens are drawn with",
    ),
    MootKey(
        "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update",
        (None, True),
        "vLLM never keeps what its image encoder computed with older weights",
    ),
    MootKey("policy.generation.vllm_cfg.max_num_seqs", (None,), "policy.generation.vllm_kwargs.max_num_seqs decides"),
    MootKey("policy.generation.vllm_cfg.enforce_monotonicity", (None, False), "an agent's prompts are independent"),
    MootKey("policy.generation.vllm_cfg.enable_thinking", (None,), "policy.tokenizer.chat_template_kwargs decides"),
)
"""Keys without effect, in the order of the notices."""


def list_keys(row: MootKey, config: Config) -> list[str]:
    """Return the keys that a row is about in a configuration: those of every model that the run holds."""
    section, _, subkey = row.key.partition(".")
    if section in ALGORITHMS:
        return [row.key] if section == config.algorithm else []
    if section == "loss_fn":
        is_moot = config.topk_logits_k and not (row.reason == _ONE_TEACHER and config.joint_teachers)
        return [row.key] if is_moot else []
    if section != "policy":
        return [row.key]
    if subkey.startswith("generation."):
        return [row.key] if config.generates else []
    return [f"{name}.{subkey}" for name in MODELS if _is_read(config, name, subkey)]


def _is_read(config: Config, name: str, subkey: str) -> bool:
    """Tell whether a run holds a model whose backend is the one that a key is for."""
    model = getattr(config, name)
    if model is None or (name != "policy" and name not in config.holds):
        return False
    backend = "megatron_cfg." if model.megatron_cfg.enabled else "dtensor_cfg."
    return not subkey.startswith(("megatron_cfg.", "dtensor_cfg.")) or subkey.startswith(backend)
