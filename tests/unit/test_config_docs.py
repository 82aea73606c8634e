"""``docs/configuration.md`` says what the structs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec.inspect import StructType

from tandem.config.conform import config_type, list_keys
from tandem.config.derive import DERIVED
from tandem.config.describe import NEW, list_nested_structs, read_field_docs, write_configuration_page
from tandem.config.dump import FREE_ON_RESUME
from tandem.config.unsupported import NO_EFFECT_YET, NOT_SUPPORTED_YET

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

NEW_KEYS = [
    "algorithm",
    "prerequisite",
    "nemo_rl_version",
    "ignored",
    "data.commit",
    "data.revision",
    "data.text_key",
    "data.characters_per_sample",
    "data.train[].commit",
    "data.train[].revision",
    "policy.revision",
    "teacher.revision",
    "value.revision",
    "policy.compile",
    "policy.warmup_steps",
    "policy.share_prompts",
    "value.compile",
    "value.warmup_steps",
    "teacher.warmup_steps",
    "value.new_model",
    "value.share_prompts",
    "teacher.compile",
    "teacher.new_model",
    "teacher.share_prompts",
    "policy.new_model",
    "policy.mtp.num_layers",
    "policy.mtp.loss_scaling_factor",
    "policy.mtp.use_repeated_layer",
    "policy.mtp.detach_heads",
    "policy.new_model.config",
    "policy.new_model.characters",
    "policy.new_model.image_processor",
    "policy.new_model.seed",
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size",
    "policy.megatron_cfg.fp4_cfg",
    "policy.megatron_cfg.forwarded",
    "policy.generation.min_p",
    "policy.generation.tool_call_parser",
    "policy.generation.adapter_sets",
    "policy.generation.transformers_cfg.adapter_sets",
    "policy.generation.transformers_cfg.num_slots",
    "eval.during_training",
    "eval.gpus",
    "eval.max_new_tokens",
    "eval.temperature",
    "eval.top_k",
    "eval.top_p",
    "grpo.adv_estimator.scale_rewards",
    "grpo.num_iterations",
    "grpo.scale_rewards",
    "grpo.set_aside_outliers",
    "grpo.streaming_training",
    "grpo.val_seed",
    "grpo.val_temperature",
    "ppo.set_aside_outliers",
    "ppo.val_seed",
    "ppo.val_temperature",
    "distillation.set_aside_outliers",
    "distillation.val_seed",
    "distillation.val_temperature",
    "off_policy_distillation.topk_logits_k",
    "logger.opentelemetry.endpoint",
    "logger.page",
    "logger.prometheus.host",
    "logger.prometheus.port",
    "logger.samples",
    "loss_fn.class",
    "loss_fn.columns.NAME.fill",
    "loss_fn.columns.NAME.source",
    "loss_fn.columns",
    "loss_fn.entropy_coef",
    "loss_fn.kwargs",
    "loss_fn.loss_scale_factor",
    "loss_fn.loss_type",
    "policy.generation.generation_timeout",
    "policy.generation.max_stored_tokens",
    "data.task",
    "data.task_params",
    "data.num_train",
    "data.num_validation",
    "data.val_split",
    "data.image_key",
    "data.max_image_pixels",
    "data.prompt_key",
    "data.chosen_key",
    "data.margin_key",
    "data.rejected_key",
    "data.rejected_template",
    "data.subset",
    "data.prompt_template",
    "data.solution_template",
    "data.environment",
    "data.train[].weight",
    "env.NAME.roles",
    "env.NAME.timeout_s",
    "env.NAME.on_error",
    "env.NAME.max_failures",
    "env.NAME.class",
    "env.NAME.correct_from",
    "env.NAME.judge",
    "env.NAME.judge.api_key_env",
    "env.NAME.judge.base_url",
    "env.NAME.judge.cache",
    "env.NAME.judge.correct_from",
    "env.NAME.judge.dollars_per_million_completion_tokens",
    "env.NAME.judge.dollars_per_million_prompt_tokens",
    "env.NAME.judge.extra_body",
    "env.NAME.judge.highest_score",
    "env.NAME.judge.lowest_score",
    "env.NAME.judge.max_concurrency",
    "env.NAME.judge.max_retries",
    "env.NAME.judge.max_tokens",
    "env.NAME.judge.model",
    "env.NAME.judge.prompt",
    "env.NAME.judge.score_pattern",
    "env.NAME.judge.system_prompt",
    "env.NAME.judge.temperature",
    "env.NAME.judge.timeout_s",
    "env.NAME.verifiers",
    "env.NAME.verifiers.args",
    "env.NAME.verifiers.correct_from",
    "env.NAME.verifiers.env",
    "env.NAME.verifiers.id",
    "env.NAME.verifiers.python",
    "env.NAME.verifiers.validation_args",
    "env.NAME.harbor",
    "env.NAME.harbor.agent",
    "env.NAME.harbor.correct_from",
    "env.NAME.harbor.kwargs",
    "env.NAME.harbor.memory_mb",
    "env.NAME.harbor.network",
    "env.NAME.harbor.paths",
    "env.NAME.harbor.processes",
    "env.NAME.harbor.python",
    "env.NAME.harbor.reward",
    "env.NAME.harbor.root",
    "env.NAME.harbor.storage_mb",
    "env.NAME.harbor.tasks",
    "env.NAME.harbor.timeout_multiplier",
    "env.NAME.harbor.validation_tasks",
    "env.NAME.harbor.variables",
    "env.NAME.nemo_gym",
    "env.NAME.nemo_gym.agent",
    "env.NAME.nemo_gym.correct_from",
    "env.NAME.nemo_gym.python",
    "env.NAME.nemo_gym.variables",
    "env.NAME.openenv",
    "env.NAME.openenv.action",
    "env.NAME.openenv.correct_from",
    "env.NAME.openenv.image",
    "env.NAME.openenv.max_turns",
    "env.NAME.openenv.observation",
    "env.NAME.openenv.package",
    "env.NAME.openenv.python",
    "env.NAME.openenv.reset",
    "env.NAME.openenv.resets",
    "env.NAME.openenv.step_timeout_s",
    "env.NAME.openenv.system_prompt",
    "env.NAME.openenv.url",
    "env.NAME.openenv.variables",
    "env.NAME.kwargs",
    "env.NAME.command",
    "env.NAME.persistent",
    "env.NAME.url",
    "env.NAME.max_concurrency",
    "env.NAME.max_completions",
    "cluster.trainers",
    "cluster.processes_of.reference",
    "cluster.processes_of.value",
    "cluster.processes_of.teacher",
    "cluster.rollouts",
    "cluster.launch",
    "cluster.launch.trainers",
    "cluster.launch.rollouts",
    "cluster.launch.refit",
    "cluster.address",
    "cluster.threads_per_process",
    "cluster.heartbeat_interval_s",
    "cluster.heartbeat_timeout_s",
    "cluster.orphan_timeout_s",
    "cluster.deadlines.join_s",
    "cluster.deadlines.build_s",
    "cluster.deadlines.generate_s",
    "cluster.deadlines.train_s",
    "cluster.deadlines.leave_s",
    "cluster.deadlines.refit_s",
    "cluster.deadlines.save_s",
    "cluster.deadlines.evaluate_s",
    "cluster.max_replacements",
    "cluster.replacement_window_s",
    "cluster.max_rollouts",
    "cluster.links.memory",
    "cluster.links.same_gpu",
    "cluster.links.peer_gpu",
    "cluster.links.network",
    "refit.alias",
    "refit.differences",
    "refit.keep_copy",
    "refit.store",
    "refit.store_whole_every",
    "refit.stream",
    "refit.verify",
    "replay",
    "replay.run",
    "replay.run_id",
    "replay.from_step",
    "replay.to_step",
    "replay.without",
]
"""Keys that NeMo-RL v0.3 does not have."""


def documented(
    described: StructType, prefix: str = "", told: set[type] | None = None
) -> Iterator[tuple[str, str, bool]]:
    """Yield key, docstring, and whether the field is a section (which its own struct documents); each struct once."""
    told = set() if told is None else told
    if described.cls in told:
        return
    told.add(described.cls)
    docs = read_field_docs(described)
    for field in described.fields:
        yield f"{prefix}{field.encode_name}", docs[field.encode_name], isinstance(field.type, StructType)
    for key, inner in list_nested_structs(prefix, described):
        assert inner.cls.__doc__, key
        yield from documented(inner, f"{key}.", told)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == write_configuration_page(), (
        "run: python -m tandem.config.describe > docs/configuration.md"
    )


def test_every_key_is_documented() -> None:
    undocumented = [key for key, doc, is_section in documented(config_type()) if not doc and not is_section]
    assert undocumented == []


def test_new_keys_are_marked() -> None:
    assert sorted(key for key, doc, _ in documented(config_type()) if doc.startswith(NEW)) == sorted(NEW_KEYS)


def test_tables_name_keys_that_exist() -> None:
    known = set(list_keys(config_type()))
    named = {row.key for row in (*NOT_SUPPORTED_YET, *NO_EFFECT_YET)} | {rule.key for rule in DERIVED}
    assert (named | set(FREE_ON_RESUME)) - known == set()
