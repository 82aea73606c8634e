"""Names of TRL and verl for settings that have a key here, for the errors about unknown keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from tandem.config.schema.declarations import ALGORITHMS

_KL, _LR = "loss_fn.reference_policy_kl_penalty", "policy.optimizer.kwargs.lr"
_MICRO, _GLOBAL, _SCORED = (
    f"policy.{name}" for name in ("train_micro_batch_size", "train_global_batch_size", "logprob_batch_size")
)
_TEMPLATE, _CORRECTION = "policy.tokenizer.chat_template", "loss_fn.use_importance_sampling_correction"
_CORRECTED_AT, _CORRECTED = (
    "loss_fn.truncated_importance_sampling_ratio",
    "loss_fn.truncated_importance_sampling_type",
)
_VLLM, _LENGTH, _RECOMPUTE = (
    "policy.generation.vllm_cfg",
    "policy.max_total_sequence_length",
    "policy.dtensor_cfg.activation_checkpointing",
)
_GPUS, _CHECKPOINTS, _RESUME = "cluster.gpus_per_node", "checkpointing.checkpoint_dir", "up --resume, no key"
_SCHEDULE, _WARMUP = "policy.scheduler", "policy.warmup_steps"
_ELSEWHERE = "no key: the loss is a class (loss_fn.class)"

TRL: dict[str, str] = {
    # GRPOConfig
    "num_generations": "grpo.num_generations_per_prompt",
    "num_generations_eval": "grpo.num_val_generations_per_prompt",
    "max_completion_length": "policy.generation.max_new_tokens",
    "max_prompt_length": "data.max_input_seq_length",
    "shuffle_dataset": "data.shuffle",
    "generation_batch_size": "grpo.num_prompts_per_step, times grpo.num_generations_per_prompt",
    "steps_per_generation": "grpo.num_prompts_per_step, for policy.train_global_batch_size samples an optimizer step",
    "temperature": "policy.generation.temperature",
    "top_p": "policy.generation.top_p",
    "top_k": "policy.generation.top_k",
    "min_p": "policy.generation.min_p",
    "repetition_penalty": "",
    "generation_kwargs": "policy.generation",
    "chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    "use_vllm": "policy.generation.backend",
    "vllm_mode": "policy.generation.colocated.enabled",
    "vllm_gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
    "vllm_max_model_length": f"{_VLLM}.max_model_len",
    "vllm_tensor_parallel_size": f"{_VLLM}.tensor_parallel_size",
    "beta": f"{_KL}, for DPO dpo.reference_policy_kl_penalty",
    "num_iterations": "grpo.num_iterations",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "delta": "loss_fn.ratio_clip_c",
    "importance_sampling_level": "loss_fn.sequence_level_importance_ratios",
    "reward_weights": "grpo.adv_estimator.reward_weights",
    "multi_objective_aggregation": "grpo.adv_estimator.name",
    "scale_rewards": "grpo.scale_rewards",
    "loss_type": "loss_fn.loss_type",
    "mask_truncated_completions": "grpo.overlong_filtering",
    "entropy_coef": "loss_fn.entropy_coef",
    "max_tool_calling_iterations": "grpo.max_rollout_turns",
    "vllm_importance_sampling_correction": _CORRECTION,
    "vllm_importance_sampling_mode": _CORRECTED,
    "vllm_importance_sampling_clip_max": _CORRECTED_AT,
    "vllm_importance_sampling_cap": _CORRECTED_AT,
    "vllm_importance_sampling_clip_min": f"{_CORRECTED_AT}_min",
    "use_bias_correction_kl": "loss_fn.use_on_policy_kl_approximation",
    "num_completions_to_print": "logger.num_val_samples_to_print",
    "log_completions": "logger.samples, which records every sample",
    "disable_dropout": "no key: dropout is always off",
    "pad_to_multiple_of": "policy.make_sequence_length_divisible_by",
    "model_init_kwargs": "policy.hf_config_overrides",
    "router_aux_loss_coef": "policy.megatron_cfg.moe_router_load_balancing_type, on Megatron-Core",
    "cast_lm_head_to_fp32": "",
    "trust_remote_code": "no key: only models of Transformers itself are loaded",
    "remove_unused_columns": "no key: environments get every field of a row",
    "ds3_gather_for_generation": "no key: weights go to engines by slices",
    "cache_implementation": "no key: the engines have their own",
    "vllm_model_impl": "policy.generation.vllm_kwargs",
    "vllm_enable_sleep_mode": "no key: colocated engines sleep while training has the GPU",
    "vllm_structured_outputs_regex": "",
    "vllm_server_base_url": "no key: the run starts its engines (cluster.rollouts)",
    "vllm_server_host": "no key: the run starts its engines (cluster.rollouts)",
    "vllm_server_port": "no key: the run starts its engines (cluster.rollouts)",
    "vllm_server_timeout": "no key: the run starts its engines (cluster.rollouts)",
    "vllm_group_port": "no key: the run starts its engines (cluster.rollouts)",
    "sapo_temperature_neg": _ELSEWHERE,
    "sapo_temperature_pos": _ELSEWHERE,
    "vespo_k_pos": _ELSEWHERE,
    "vespo_lambda_pos": _ELSEWHERE,
    "vespo_k_neg": _ELSEWHERE,
    "vespo_lambda_neg": _ELSEWHERE,
    "sync_ref_model": "",
    "ref_model_mixup_alpha": "",
    "ref_model_sync_steps": "",
    "top_entropy_quantile": "",
    "use_adaptive_entropy": "",
    "entropy_coef_min": "",
    "entropy_coef_max": "",
    "entropy_coef_delta": "",
    "entropy_target": "",
    "off_policy_mask_threshold": "grpo.seq_logprob_error_threshold, which is another measure",
    "log_multimodal": "logger.samples, which records every sample",
    "log_unique_prompts": "logger.samples, which records every sample",
    "log_completions_hub_repo": "logger.samples, which records every sample",
    "use_transformers_continuous_batching": "policy.generation.backend",
    "transformers_continuous_batching_config": "policy.generation.transformers_cfg",
    "use_transformers_paged": "policy.generation.backend",
    # SFTConfig and DPOConfig
    "chat_template_path": _TEMPLATE,
    "dataset_text_field": "data.chat_key, or data.input_key and data.output_key",
    "dataset_kwargs": "no key: rows become tokens by the keys of data",
    "dataset_num_proc": "no key: rows are read by the coordinator",
    "eos_token": "no key: the model's own files say what ends a turn",
    "pad_token": "no key: padding is never learned",
    "max_length": _LENGTH,
    "truncation_mode": "no key: longer sequences are left out, with a notice",
    "packing": "policy.sequence_packing.enabled",
    "packing_strategy": "policy.sequence_packing.algorithm",
    "padding_free": "policy.sequence_packing.enabled",
    "eval_packing": "policy.sequence_packing.enabled",
    "completion_only_loss": "no key: only solutions are learned",
    "assistant_only_loss": "no key: only the assistant's turns are learned",
    "activation_offloading": "policy.dtensor_cfg.cpu_offload, which keeps weights on the CPU",
    "precompute_ref_log_probs": "no key: the reference scores each batch",
    "precompute_ref_batch_size": _SCORED,
    "loss_weights": "dpo.preference_loss_weight and dpo.sft_loss_weight",
    "ld_alpha": _ELSEWHERE,
    "f_divergence_type": _ELSEWHERE,
    "f_alpha_divergence_coef": _ELSEWHERE,
    "label_smoothing": _ELSEWHERE,
    "use_weighting": _ELSEWHERE,
    "discopop_tau": _ELSEWHERE,
    # Of transformers.TrainingArguments
    "learning_rate": _LR,
    "weight_decay": "policy.optimizer.kwargs.weight_decay",
    "adam_beta1": "policy.optimizer.kwargs.betas",
    "adam_beta2": "policy.optimizer.kwargs.betas",
    "adam_epsilon": "policy.optimizer.kwargs.eps",
    "optim": "policy.optimizer.name",
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler_kwargs": _SCHEDULE,
    "warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP,
    "per_device_train_batch_size": _MICRO,
    "per_device_eval_batch_size": "sft.val_micro_batch_size",
    "gradient_accumulation_steps": f"{_GLOBAL}, samples of an optimizer step",
    "gradient_checkpointing": _RECOMPUTE,
    "num_train_epochs": "the algorithm's max_num_epochs, such as grpo.max_num_epochs",
    "max_steps": "the algorithm's max_num_steps, such as grpo.max_num_steps",
    "eval_steps": "the algorithm's val_period, such as grpo.val_period",
    "eval_strategy": "the algorithm's val_period, such as grpo.val_period",
    "save_steps": "checkpointing.save_period",
    "save_strategy": "checkpointing.enabled",
    "save_total_limit": "checkpointing.keep_top_k",
    "metric_for_best_model": "checkpointing.metric_name",
    "greater_is_better": "checkpointing.higher_is_better",
    "output_dir": f"{_CHECKPOINTS} and logger.log_dir",
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "report_to": "logger.wandb_enabled and the like",
    "run_name": "logger.wandb.name",
    "logging_steps": "no key: each step is logged",
    "logging_dir": "logger.log_dir",
    "use_liger_kernel": "policy.compile",
    "torch_empty_cache_steps": "",
    "resume_from_checkpoint": _RESUME,
    "deepspeed": "policy.dtensor_cfg, or policy.megatron_cfg",
    "fsdp": "policy.dtensor_cfg.enabled",
    "fsdp_config": "policy.dtensor_cfg.enabled",
    "optim_args": "policy.optimizer.kwargs",
    "max_grad_norm": "policy.max_grad_norm",
    "activation_checkpointing": _RECOMPUTE,
    "torch_compile": "policy.compile",
    "liger_kernel_config": "policy.compile",
    "eval_delay": "the algorithm's val_start_at, such as grpo.val_start_at",
    "eval_on_start": "the algorithm's val_at_start, such as grpo.val_at_start",
    "save_only_model": "checkpointing.save_optimizer",
    "seed": "the algorithm's seed, such as grpo.seed",
    "data_seed": "the algorithm's seed, such as grpo.seed",
    "project": "logger.wandb.project",
    "logging_strategy": "no key: each step is logged",
    "logging_first_step": "no key: each step is logged",
    "parallelism_config": "policy.dtensor_cfg.tensor_parallel_size",
    "dataloader_num_workers": "data.num_workers",
    "train_sampling_strategy": "data.shuffle",
    "use_cpu": f"{_GPUS}, where 0 is the CPU",
    "push_to_hub": "no key: coordinator push",
    "hub_model_id": "no key: coordinator push",
    "label_smoothing_factor": _ELSEWHERE,
    "average_tokens_across_devices": "no key: means are over the global batch",
    "bf16_full_eval": "policy.precision",
    "fp16_full_eval": "policy.precision",
    **dict.fromkeys(
        (
            *("tf32", "optim_target_modules", "load_best_model_at_end", "neftune_noise_alpha"),
            *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
            *("torch_compile_backend", "torch_compile_mode"),
        ),
        "",
    ),
    **dict.fromkeys(
        [
            "use_cache",
            "auto_find_batch_size",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "log_level",
            "log_level_replica",
            "disable_tqdm",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "save_on_each_node",
            "enable_jit_checkpoint",
            "hub_token",
            "hub_private_repo",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "full_determinism",
            "accelerator_config",
            "dataloader_drop_last",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "label_names",
            "length_column_name",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
            "debug",
            "skip_memory_metrics",
            "do_train",
            "do_eval",
            "do_predict",
            "local_rank",
        ],
        "no key: it is of Transformers' own trainer",
    ),
}
"""The names here of the fields of TRL 1.16's configurations: a key, a sentence that begins with one or with
``no key``, or an empty text for what is not built."""

_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))

VERL: dict[str, str] = {
    "actor_rollout_ref": "",
    f"{_ACTOR}.optim.lr": _LR,
    f"{_ACTOR}.optim.weight_decay": "policy.optimizer.kwargs.weight_decay",
    f"{_ACTOR}.optim.betas": "policy.optimizer.kwargs.betas",
    f"{_ACTOR}.optim.optimizer": "policy.optimizer.name",
    f"{_ACTOR}.optim.optimizer_impl": "policy.optimizer.name",
    f"{_ACTOR}.optim.override_optimizer_config": "policy.optimizer.kwargs",
    f"{_ACTOR}.optim.clip_grad": "policy.max_grad_norm",
    f"{_ACTOR}.optim.lr_warmup_steps": _WARMUP,
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": _WARMUP,
    f"{_ACTOR}.optim.total_training_steps": "the algorithm's max_num_steps, such as grpo.max_num_steps",
    **dict.fromkeys(
        (
            f"{_ACTOR}.optim.{name}"
            for name in ("min_lr_ratio", "num_cycles", "lr_scheduler_type", "warmup_style", "zero_indexed_step")
        ),
        _SCHEDULE,
    ),
    f"{_ACTOR}.grad_clip": "policy.max_grad_norm",
    f"{_ACTOR}.strategy": "policy.dtensor_cfg.enabled or policy.megatron_cfg.enabled",
    f"{_ACTOR}.ppo_mini_batch_size": f"{_GLOBAL}, in samples: times grpo.num_generations_per_prompt",
    f"{_ACTOR}.ppo_micro_batch_size": _MICRO,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _MICRO,
    f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu": _SCORED,
    f"{_ACTOR}.use_dynamic_bsz": "policy.dynamic_batching.enabled",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "policy.dynamic_batching.train_mb_tokens",
    f"{_ACTOR}.ppo_infer_max_token_len_per_gpu": "policy.dynamic_batching.logprob_mb_tokens",
    f"{_ACTOR}.clip_ratio": "loss_fn.ratio_clip_min and loss_fn.ratio_clip_max",
    f"{_ACTOR}.clip_ratio_low": "loss_fn.ratio_clip_min",
    f"{_ACTOR}.clip_ratio_high": "loss_fn.ratio_clip_max",
    f"{_ACTOR}.clip_ratio_c": "loss_fn.ratio_clip_c",
    f"{_ACTOR}.policy_loss.loss_mode": "loss_fn.sequence_level_importance_ratios for gspo, loss_fn.use_cispo for cispo",
    f"{_ACTOR}.policy_loss.rollout_correction": _CORRECTION,
    f"{_ACTOR}.loss_agg_mode": "loss_fn.loss_type, or loss_fn.token_level_loss",
    f"{_ACTOR}.loss_scale_factor": "loss_fn.loss_scale_factor, with loss_fn.loss_type dr_grpo",
    f"{_ACTOR}.entropy_coeff": "loss_fn.entropy_coef",
    f"{_ACTOR}.calculate_entropy": "no key: the entropy is always measured",
    f"{_ACTOR}.use_kl_loss": _KL,
    f"{_ACTOR}.kl_loss_coef": _KL,
    f"{_ACTOR}.kl_loss_type": "loss_fn.reference_policy_kl_type",
    f"{_ACTOR}.ppo_epochs": "grpo.num_iterations, for PPO ppo.ppo_epochs",
    f"{_ACTOR}.shuffle": "",
    f"{_ACTOR}.data_loader_seed": "the algorithm's seed, such as grpo.seed",
    f"{_ACTOR}.rollout_n": "grpo.num_generations_per_prompt",
    f"{_ACTOR}.use_remove_padding": "policy.sequence_packing.enabled",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    f"{_ACTOR}.use_torch_compile": "policy.compile",
    f"{_ACTOR}.use_rollout_log_probs": "loss_fn.force_on_policy_ratio",
    f"{_ACTOR}.router_replay.mode": "policy.router_replay.enabled",
    f"{_ACTOR}.checkpoint": "checkpointing",
    f"{_ACTOR}.fsdp_config.model_dtype": "policy.precision",
    f"{_ACTOR}.fsdp_config.dtype": "policy.precision",
    f"{_ACTOR}.fsdp_config.fsdp_size": "policy.dtensor_cfg.dp_replicate_size",
    f"{_ACTOR}.fsdp_config.param_offload": "policy.dtensor_cfg.cpu_offload",
    f"{_ACTOR}.fsdp_config.optimizer_offload": "policy.dtensor_cfg.cpu_offload",
    f"{_ACTOR}.fsdp_config.strategy": "policy.dtensor_cfg",
    f"{_ACTOR}.fsdp_config.use_torch_compile": "policy.compile",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    f"{_ACTOR}.megatron": "policy.megatron_cfg",
    f"{_REF}.log_prob_micro_batch_size": _SCORED,
    f"{_REF}.log_prob_micro_batch_size_per_gpu": _SCORED,
    f"{_REF}.log_prob_use_dynamic_bsz": "policy.dynamic_batching.enabled",
    f"{_REF}.log_prob_max_token_len_per_gpu": "policy.dynamic_batching.logprob_mb_tokens",
    f"{_ROLLOUT}.n": "grpo.num_generations_per_prompt",
    f"{_ROLLOUT}.name": "policy.generation.backend",
    f"{_ROLLOUT}.temperature": "policy.generation.temperature",
    f"{_ROLLOUT}.top_p": "policy.generation.top_p",
    f"{_ROLLOUT}.top_k": "policy.generation.top_k",
    f"{_ROLLOUT}.seed": "the algorithm's seed, such as grpo.seed",
    f"{_ROLLOUT}.prompt_length": "data.max_input_seq_length",
    f"{_ROLLOUT}.response_length": "policy.generation.max_new_tokens",
    f"{_ROLLOUT}.dtype": f"{_VLLM}.precision",
    f"{_ROLLOUT}.gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
    f"{_ROLLOUT}.enforce_eager": f"{_VLLM}.enforce_eager",
    f"{_ROLLOUT}.tensor_model_parallel_size": f"{_VLLM}.tensor_parallel_size",
    f"{_ROLLOUT}.pipeline_model_parallel_size": f"{_VLLM}.pipeline_parallel_size",
    f"{_ROLLOUT}.expert_parallel_size": f"{_VLLM}.expert_parallel_size",
    f"{_ROLLOUT}.data_parallel_size": "cluster.rollouts",
    f"{_ROLLOUT}.max_model_len": f"{_VLLM}.max_model_len",
    f"{_ROLLOUT}.max_num_seqs": "policy.generation.vllm_kwargs",
    f"{_ROLLOUT}.max_num_batched_tokens": "policy.generation.vllm_kwargs",
    f"{_ROLLOUT}.engine_kwargs": "policy.generation.vllm_kwargs",
    f"{_ROLLOUT}.log_prob_micro_batch_size": _SCORED,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _SCORED,
    f"{_ROLLOUT}.val_kwargs.temperature": "grpo.val_temperature",
    f"{_ROLLOUT}.val_kwargs.n": "grpo.num_val_generations_per_prompt",
    f"{_ROLLOUT}.val_kwargs.top_p": "policy.generation.val_top_p",
    f"{_ROLLOUT}.val_kwargs.top_k": "policy.generation.val_top_k",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "grpo.max_rollout_turns",
    f"{_MODEL}.path": "policy.model_name",
    f"{_MODEL}.tokenizer_path": "policy.tokenizer.name",
    f"{_MODEL}.custom_chat_template": _TEMPLATE,
    f"{_MODEL}.override_config": "policy.hf_config_overrides",
    f"{_MODEL}.enable_gradient_checkpointing": _RECOMPUTE,
    f"{_MODEL}.use_remove_padding": "policy.sequence_packing.enabled",
    f"{_MODEL}.lora_rank": "policy.dtensor_cfg.lora_cfg.dim",
    f"{_MODEL}.lora_alpha": "policy.dtensor_cfg.lora_cfg.alpha",
    f"{_MODEL}.target_modules": "policy.dtensor_cfg.lora_cfg.target_modules",
    f"{_MODEL}.exclude_modules": "policy.dtensor_cfg.lora_cfg.exclude_modules",
    f"{_MODEL}.lora_adapter_path": "policy.dtensor_cfg.lora_cfg.restore_from",
    "algorithm.adv_estimator": "algorithm (grpo or ppo) and grpo.adv_estimator.name",
    "algorithm.gamma": "ppo.adv_estimator.gae_gamma",
    "algorithm.lam": "ppo.adv_estimator.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
    "algorithm.use_kl_in_reward": "loss_fn.use_kl_in_reward",
    "algorithm.kl_penalty": "loss_fn.reference_policy_kl_type",
    "algorithm.kl_ctrl.kl_coef": _KL,
    "algorithm.kl_ctrl": "",
    "algorithm.use_pf_ppo": "",
    "algorithm.pf_ppo": "",
    "algorithm.filter_groups.enable": "grpo.use_dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "grpo.dynamic_sampling_max_gen_batches",
    "algorithm.filter_groups": "",
    "algorithm.rollout_correction.rollout_is": _CORRECTED,
    "algorithm.rollout_correction.rollout_is_threshold": _CORRECTED_AT,
    "algorithm.rollout_correction": "",
    "algorithm.gdpo_reward_keys": "no key: the environment's components",
    "algorithm.gdpo_reward_weights": "grpo.adv_estimator.reward_weights",
    "data.train_files": "data.train_data_path",
    "data.val_files": "data.val_data_path",
    "data.train_batch_size": "grpo.num_prompts_per_step",
    "data.gen_batch_size": "grpo.batch_multiplier",
    "data.val_batch_size": "grpo.val_batch_size",
    "data.max_prompt_length": "data.max_input_seq_length",
    "data.max_response_length": "policy.generation.max_new_tokens",
    "data.train_max_samples": "data.num_train",
    "data.val_max_samples": "data.num_validation",
    "data.apply_chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    "data.reward_fn_key": "env.NAME.class, whose problems have every field",
    "data.dataloader_num_workers": "no key: data is read once",
    "data.filter_overlong_prompts": "no key: longer prompts are left out, with a notice",
    "data.truncation": "no key: longer prompts are left out, with a notice",
    "critic": "value, with the keys of policy",
    "critic.optim.lr": "value.optimizer.kwargs.lr",
    "critic.cliprange_value": "value_loss_fn.cliprange",
    "custom_reward_function": "env.NAME.class",
    "reward_model": "env.NAME.model_name",
    "trainer": "",
    "trainer.total_epochs": "the algorithm's max_num_epochs, such as grpo.max_num_epochs",
    "trainer.total_training_steps": "the algorithm's max_num_steps, such as grpo.max_num_steps",
    "trainer.project_name": "logger.wandb.project",
    "trainer.experiment_name": "logger.wandb.name",
    "trainer.logger": "logger.wandb_enabled and the like",
    "trainer.log_val_generations": "logger.num_val_samples_to_print",
    "trainer.nnodes": "cluster.num_nodes",
    "trainer.n_gpus_per_node": _GPUS,
    "trainer.save_freq": "checkpointing.save_period",
    "trainer.test_freq": "the algorithm's val_period, such as grpo.val_period",
    "trainer.val_before_train": "the algorithm's val_at_start, such as grpo.val_at_start",
    "trainer.val_only": "grpo.max_num_steps of 0",
    "trainer.critic_warmup": "ppo.policy_training_start_step",
    "trainer.resume_mode": _RESUME,
    "trainer.resume_from_path": _RESUME,
    "trainer.default_local_dir": _CHECKPOINTS,
    "trainer.max_actor_ckpt_to_keep": "checkpointing.keep_top_k",
}
"""The same of verl 0.9, by whole paths; of what has no row, the nearest section above counts."""

_SHORT = {
    "optim.lr": _LR,
    "optimizer.lr": _LR,
    "policy.optimizer.lr": _LR,
    "policy.optimizer.weight_decay": "policy.optimizer.kwargs.weight_decay",
    "policy.optimizer.betas": "policy.optimizer.kwargs.betas",
    "policy.optimizer.eps": "policy.optimizer.kwargs.eps",
}
"""Shorter paths, as people write them."""
_OF_SECTION = {
    "dpo.loss_type": "loss_fn.class; sigmoid is the default",
    "sft.loss_type": "loss_fn.class; nll is the default",
}
"""Names of TRL's that are something else in the section of an algorithm."""
_ANY_ALGORITHM = "the algorithm's "
_FLAT = ("", "grpo", "ppo", "sft", "dpo", "rm", "loss_fn", "policy", "policy.generation", "policy.optimizer", "trainer")
"""Sections in which a name of TRL's, which has no sections, may have been written."""


class PeerKey(NamedTuple):
    """A setting of a peer."""

    peer: str
    path: str
    """Path in the file."""
    equivalent: str
    """Its name here; empty if it is not built."""

    @property
    def hint(self) -> str:
        """The end of the error."""
        if self.equivalent.startswith("no key"):
            return f"; {self.peer} has it, and here there is {self.equivalent}"
        if not self.equivalent:
            return f"; {self.peer} has it, and here there is nothing like it"
        key, _, more = self.equivalent.partition(" ")
        key, comma = (key[:-1], key[-1]) if key[-1] in ",;" else (key, "")
        if "." not in key:
            return f"; {self.peer}'s word for {self.equivalent}"
        return f"; did you mean {key!r}{comma}{f' {more}' if more else ''}? {self.peer} calls it so"


def find_peer_keys(path: str, value: Any) -> list[PeerKey]:
    """Return the settings of a peer at an unknown path, and below it where its value is a section."""
    section_key = _find_peer_key(path)
    if isinstance(value, dict) and value and (section_key is None or path in VERL or section_key.peer == "verl"):
        inner_keys = [each for name, inner in value.items() for each in find_peer_keys(f"{path}.{name}", inner)]
        return inner_keys or ([section_key] if section_key is not None else [])
    return [section_key] if section_key is not None else []


def _find_peer_key(path: str) -> PeerKey | None:
    if path in _SHORT:
        return PeerKey("verl", path, _SHORT[path])
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        section = ".".join(parts[:count])
        if section in VERL and (count == len(parts) or section not in ("data", "algorithm")):
            return PeerKey("verl", path, VERL[section])
    section, _, name = path.rpartition(".")
    equivalent = _OF_SECTION.get(path) or (TRL.get(name) if section in _FLAT else None)
    if equivalent is None or equivalent.partition(" ")[0].rpartition(".")[2] == name:
        return None  # a key of that name is found without this table
    if equivalent.startswith(_ANY_ALGORITHM) and section in ALGORITHMS:
        equivalent = f"{section}.{equivalent.removeprefix(_ANY_ALGORITHM).partition(',')[0]}"
    return PeerKey("TRL", path, equivalent)
