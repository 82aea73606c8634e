"""Keys that a run does not read, each with a notice: of ``data``, and those that others decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from tandem.common.errors import nearest
from tandem.config import named
from tandem.config.models.families import is_text_only
from tandem.config.models.model_sizes import read_model_config
from tandem.config.problem import describe_without_effect
from tandem.config.schema import MODELS, Config, DataConfig
from tandem.config.schema.data import OF_EACH_SET
from tandem.config.schema.declarations import ALGORITHMS
from tandem.config.schema.environments import NEMO_GYM_ROWS, PACKAGED

RowKind = Literal["generated", "problems", "conversations", "preferences", "texts"]
"""The form of a data set's items. Generated problems have no rows."""
_OWN_FORM = ("squad", "open_assistant", "HelpSteer3", NEMO_GYM_ROWS)
"""Data sets whose fields have names of their own."""


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
_AS_GIVEN = "the reward is what the environment gives"
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
    MootKey("reward_penalties.penalize_duplicated_reasoning", (False,), _AS_GIVEN),
    MootKey("reward_penalties.penalize_empty_final_answer", (False,), _AS_GIVEN),
    MootKey("reward_penalties.penalize_unwanted_tokens", (False,), _AS_GIVEN),
    MootKey("reward_penalties.penalize_malformed_think_tag", (False,), _AS_GIVEN),
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
    MootKey(
        "policy.megatron_cfg.mtp_num_layers",
        (None, 0),
        "Megatron-Core does not train these layers here: policy.mtp does",
    ),
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
        "policy.generation.expose_http_server, tool_call_parser and policy.tokenizer decide; those two take its "
        "tool_parser, chat_template and default_chat_template_kwargs for NeMo Gym",
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


class DataView(msgspec.Struct, frozen=True):
    """One data set of a run, as if it were the only one."""

    config: Config
    data: DataConfig
    key: str
    """Where it is configured."""

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.data.dataset_name

    @property
    def kind(self) -> RowKind:
        """The form of its items."""
        if self.name in named.GENERATED or self.name in PACKAGED:
            return "generated"
        if named.holds_texts(self.name):
            return "texts"
        if self.config.declaration.learns_preferences:
            return "preferences"
        is_conversation = self.name in _OWN_FORM or self.data.chat_key is not None
        return "conversations" if is_conversation and not self.config.declaration.rolls_out else "problems"

    @property
    def has_fields(self) -> bool:
        """Whether the names of its fields may differ."""
        return self.name not in _OWN_FORM and self.kind != "generated"


class DataKey(msgspec.Struct, frozen=True):
    """Keys of ``data`` that only some runs read."""

    names: tuple[str, ...]
    is_read: Callable[[DataView], bool]
    reason: str
    """Why another run does not read them."""


def _of_kinds(*kinds: RowKind) -> Callable[[DataView], bool]:
    return lambda view: view.kind in kinds and view.has_fields


def _is_supervised(view: DataView) -> bool:
    return not view.config.declaration.rolls_out


_WITHOUT_TOOLS = ("squad", "HelpSteer3", NEMO_GYM_ROWS)
"""Data sets whose rows have a form of their own, without tools, or in which an agent finds them."""

DATA_KEYS = (
    DataKey(("input_key", "output_key"), _of_kinds("problems"), "only rows with a question and an answer have them"),
    DataKey(
        ("chat_key",),
        lambda view: _is_supervised(view) and view.kind == "conversations" and view.name not in _OWN_FORM,
        "only SFT and off-policy distillation read conversations by it",
    ),
    DataKey(
        ("system_key",),
        lambda view: view.kind == "conversations" and view.name != "squad",
        "only conversations of SFT and off-policy distillation are read by it",
    ),
    DataKey(
        ("tool_key",),
        lambda view: view.kind in ("problems", "conversations", "preferences") and view.name not in _WITHOUT_TOOLS,
        "only rows have tools",
    ),
    DataKey(("prompt_key", "chosen_key", "rejected_key"), _of_kinds("preferences"), "only rows of pairs have them"),
    DataKey(("text_key", "characters_per_sample"), _of_kinds("texts"), "only arrow_text is raw text"),
    DataKey(("image_key",), _of_kinds("problems", "conversations", "preferences"), "only rows have images"),
    DataKey(("max_image_pixels",), lambda view: _may_take_more(view.config), "policy.model_name is a text model"),
    DataKey(
        ("task_params",), lambda view: view.name in named.GENERATED, "only problems that are generated have parameters"
    ),
    DataKey(
        ("train_data_path",),
        lambda view: named.is_local(view.name) or named.holds_texts(view.name) or _has_copies(view),
        "data.dataset_name decides, and only that of a file, such as jsonl, reads one",
    ),
    DataKey(
        ("val_data_path",),
        lambda view: named.is_local(view.name),
        "data.dataset_name decides, and only that of a file, such as jsonl, reads one",
    ),
    DataKey(
        ("val_split", "subset", "revision", "split"),
        lambda view: view.kind != "generated" and not _is_of_files(view),
        "only data sets on the Hub have it",
    ),
    # Tasks have both for runs of all algorithms, of which some write no solutions.
    DataKey(
        ("solution_template", "prompt_template", "prompt_file"),
        lambda view: view.kind in ("problems", "generated"),
        "the rows have whole prompts and responses",
    ),
    DataKey(
        ("rejected_template",),
        lambda view: view.kind == "generated" and view.config.declaration.learns_preferences,
        "only DPO and reward models have it, of problems that are generated",
    ),
    DataKey(
        ("system_prompt", "system_prompt_file"), lambda view: view.kind != "texts", "raw text has no system message"
    ),
    DataKey(
        ("add_eos", "add_generation_prompt"),
        _is_supervised,
        "the chat template and the policy write the turns of rollouts",
    ),
    DataKey(
        ("num_prompts_per_dataloader",),
        lambda view: view.config.data.use_multiple_dataloader,
        "data.use_multiple_dataloader is false",
    ),
    DataKey(
        ("custom_dataloader",),
        lambda view: view.config.data.use_multiple_dataloader or view.data.takes_turns_by_example,
        "data.use_multiple_dataloader is false",
    ),
    DataKey(("download_dir",), lambda view: view.name == "refcoco", "rows are read from where datasets keeps them"),
)
"""Keys of ``data`` that not all runs read, but those that are refused, and those of `tandem.config.unread_keys`."""
PROCESSORS = (
    "chat_kd_processor",
    "default",
    "helpsteer3_data_processor",
    "kd_data_processor",
    "math_data_processor",
    "math_gdpo_data_processor",
    "math_hf_data_processor",
    "multichoice_qa_processor",
    "nemo_gym_data_processor",
    "sft_processor",
    "vlm_hf_data_processor",
)
"""Values of ``processor`` in NeMo-RL v0.7 and its main branch. They follow from the data set and other keys."""


def _may_take_more(config: Config) -> bool:
    """Tell whether the model takes more than text, or is not on this machine."""
    return read_model_config(config.policy) is None or not is_text_only(config.policy)


def _is_of_files(view: DataView) -> bool:
    """Tell whether rows are read from files, here or below ``hf://``."""
    place = str(view.data.train_data_path)
    return (
        place.endswith(named.TEXT_FILES) or place.startswith(named.HUB_FILES)
        if view.kind == "texts"
        else named.is_local(view.name)
    )


def _has_copies(view: DataView) -> bool:
    """Tell whether the user may have a copy of a data set that is known by name."""
    data_set = named.NAMED.get(view.name)
    return data_set is not None and bool(data_set.splits)


_OF_EACH_SET = {name: name for name in OF_EACH_SET} | {"train_data_path": "data_path"}
"""Keys of a listed data set, by those of ``data``."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(DataConfig)}


def _default(name: str, dataset_name: str) -> Any:
    """Return the value of a key that is not set."""
    data_set = named.NAMED.get(dataset_name)
    if data_set is not None and name in data_set.keys:
        return data_set.keys[name]
    plain = _DEFAULTS[name]
    return named.DEFAULT_FIELDS.get(name) if plain is msgspec.NODEFAULT else plain


def notice_data_keys(config: Config) -> Iterator[str]:
    """Yield the keys of ``data``, and of the sets that it lists, that this run does not read."""
    data = config.data
    listed = [
        DataView(config, data.of_set(each), f"data.{side}[{index}]")
        for side, sets in (("train", data.train), ("validation", data.validation))
        for index, each in enumerate(sets)
    ]
    section_view = [DataView(config, data, "data")]
    for row in DATA_KEYS:
        for name in row.names:
            is_of_sets = bool(listed) and name in _OF_EACH_SET
            for view in listed if is_of_sets else section_view:
                value = getattr(view.data, name)
                if value not in (None, {}) and value != _default(name, view.name) and not row.is_read(view):
                    key = _OF_EACH_SET[name] if is_of_sets else name
                    yield describe_without_effect(f"{view.key}.{key}", value, row.reason)
    for view in listed or section_view:
        processor = view.data.processor
        if processor is not None and processor not in PROCESSORS:
            reason = (
                f"it is none of NeMo-RL's functions, and other keys describe the rows{nearest(processor, PROCESSORS)}"
            )
            yield describe_without_effect(f"{view.key}.processor", processor, reason)
        elif processor == named.MULTIPLE_CHOICE and view.kind != "problems":
            reason = "only rows with a question have choices"
            yield describe_without_effect(f"{view.key}.processor", processor, reason)
