"""Every key of the configuration is read by something, told of in a notice, or refused.

`tests.harness.key_readers` finds what reads a key, from the syntax trees of the sources. Keys that are read in another
way are listed here, each with the line that does it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from msgspec import inspect
from msgspec.inspect import StructType

from tandem.config.conform import config_type
from tandem.config.schema.base import ConfigSection
from tandem.config.schema.data import OF_EACH_SET
from tandem.config.unread_keys import MOOT
from tandem.config.unsupported import NO_EFFECT_YET, NOT_SUPPORTED_YET
from tests.harness.key_readers import CONFIG, ROOT, all_reads, readers_of

_CONFIG = "libs/config/src/tandem/config"
_TRAINER = "services/trainer/src/tandem/trainer"

_PROGRAMS = "libs/samples/src/tandem/samples/packaged_environments/programs"
OTHERWISE = {
    "nemo_rl_version": (f"{_CONFIG}/load.py", 'settings.get("nemo_rl_version")'),
    "grpo.normalize_rewards": (f"{_CONFIG}/derive.py", '"grpo.normalize_rewards")'),
    "grpo.scale_rewards": (f"{_CONFIG}/derive.py", '"grpo.scale_rewards")'),
    "grpo.use_leave_one_out_baseline": (f"{_CONFIG}/derive.py", '"grpo.use_leave_one_out_baseline")'),
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.gpus_per_node": (
        f"{_CONFIG}/derive.py",
        '("num_nodes", "gpus_per_node")',
    ),
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes": (
        f"{_CONFIG}/derive.py",
        '("num_nodes", "gpus_per_node")',
    ),
    **{
        f"{name}.skip_reference_policy_logprobs_calculation": (
            f"{_CONFIG}/checks/loss.py",
            "getattr(config, name).skip_reference_policy_logprobs_calculation",
        )
        for name in ("grpo", "ppo")
    },
    "loss_fn.reverse_kl": (f"{_CONFIG}/shapes.py", 'loss["kl_type"] = "reverse" if loss["reverse_kl"]'),
    "loss_fn.vocab_topk": (f"{_CONFIG}/shapes.py", 'moved["topk_logits_k"] = loss["vocab_topk"]'),
    "policy.revision": (
        "libs/launch/src/tandem/launch/preparing/needed_models.py",
        "section.revision if isinstance(section, ModelConfig)",
    ),
    "policy.megatron_cfg.moe_router_dtype": (
        f"{_TRAINER}/backends/megatron/settings.py",
        '_OF_EXPERTS = ("moe_router_dtype",',
    ),
    "policy.megatron_cfg.moe_router_load_balancing_type": (
        f"{_TRAINER}/backends/megatron/settings.py",
        '"moe_router_load_balancing_type",',
    ),
    "policy.megatron_cfg.moe_router_bias_update_rate": (
        f"{_TRAINER}/backends/megatron/settings.py",
        '"moe_router_bias_update_rate")',
    ),
    "policy.generation_batch_size": (
        f"{_CONFIG}/derive.py",
        '_derive_same("policy.generation.transformers_cfg.num_slots", "policy.generation_batch_size")',
    ),
    "policy.generation.val_temperature": (f"{_CONFIG}/shapes.py", '"val_temperature", "val_temperature"'),
    "data.solution_template": (
        "libs/samples/src/tandem/samples/data_sets/conversations.py",
        'keys = ["solution_template",',
    ),
    "data.rejected_template": (
        "libs/samples/src/tandem/samples/data_sets/conversations.py",
        '*(["rejected_template"] if',
    ),
    **{
        f"data.train.{name}": (f"{_CONFIG}/data_sets.py", "for name in OF_EACH_SET:")
        for name in OF_EACH_SET
        if name not in ("dataset_name", "revision", "commit", "split", "prompt_file", "system_prompt_file")
    },
    **{
        f"cluster.processes_of.{model}": (f"{_CONFIG}/schema/root.py", "getattr(self.cluster.processes_of, model)")
        for model in ("reference", "value", "teacher")
    },
    **{
        f"cluster.links.{wire}": ("services/refit/src/tandem/refit/cost.py", "getattr(rates, wire)")
        for wire in ("memory", "same_gpu", "peer_gpu")
    },
    **{
        f"{name}.val_num_generations_per_prompt": (
            f"{_CONFIG}/shapes.py",
            '"val_num_generations_per_prompt"',
        )
        for name in ("grpo", "ppo", "distillation")
    },
    **{
        f"env.{kind}.{name}": (f"{_PROGRAMS}/play_{kind}.py", f'settings["{name}"]')
        for kind, names in (
            ("verifiers", "id args validation_args env correct_from"),
            (
                "openenv",
                "package image url python variables reset resets system_prompt action observation max_turns "
                "step_timeout_s correct_from",
            ),
            ("nemo_gym", "config agent variables correct_from"),
            ("harbor", "agent kwargs validation_tasks variables timeout_multiplier reward correct_from"),
        )
        for name in names.split()
    },
    "env.verifiers.python": (f"{_PROGRAMS}/../tasks.py", "else settings.python"),
    "env.nemo_gym.python": (f"{_PROGRAMS}/../tasks.py", "else settings.python"),
    "env.harbor.python": (f"{_PROGRAMS}/../tasks.py", "else settings.python"),
    "env.harbor.tasks": (f"{_PROGRAMS}/play_harbor.py", 'describe("tasks")'),
    **{
        f"env.harbor.{name}": (f"{_PROGRAMS}/harbor_sandbox.py", f'settings["{name}"]')
        for name in ("network", "root", "paths", "memory_mb", "storage_mb", "processes")
    },
}
"""Keys that are read by a name in a variable, or by another key that they set: the file, and the text that does it."""

CHECKED = {
    "policy.megatron_cfg.pipeline_dtype": "checks/megatron.py",
    "policy.megatron_cfg.peft.lora_dtype": "checks/adapters.py",
    "env.checkpoint_path": "checks/data.py",
    "env.enabled": "checks/data.py",
}
"""Keys whose rule refuses every value but the one that is so anyway."""

ALWAYS = {
    "ppo.adv_estimator.name": "there is only one",
    "policy.reward_model_cfg.reward_model_type": "there is only one",
    "policy.sequence_packing.fuse_loss": "the loss of a row is always computed at once",
    "policy.generation.vllm_cfg.load_format": "with either word, weights come by refit",
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": "the metrics of a step always include them",
    "teacher.generation": "a teacher generates nothing, in NeMo-RL neither",
    "teacher.generation_batch_size": "a teacher generates nothing, in NeMo-RL neither",
    "env.resources.num_nodes": "each node with rollouts has a reward model",
    "env.offload_optimizer_for_logprob": "a reward model has no optimizer, in NeMo-RL neither",
    "env.processor": "rows are read before environments score, in NeMo-RL too",
}
"""Keys whose every value means what happens anyway."""

OF_OTHERS = {
    "policy.quant_calib_size": "policy.quant_cfg",
    "policy.quant_sequence_length": "policy.quant_cfg",
    "policy.quant_batch_size": "policy.quant_cfg",
    "policy.quant_calib_data": "policy.quant_cfg",
    "policy.disable_modelopt_layer_spec": "policy.quant_cfg",
    "policy.megatron_cfg.peft.dropout_position": "policy.megatron_cfg.peft.dropout",
    "policy.megatron_cfg.mtp_loss_scaling_factor": "policy.megatron_cfg.mtp_num_layers",
    "policy.megatron_cfg.mtp_use_repeated_layer": "policy.megatron_cfg.mtp_num_layers",
    "policy.megatron_cfg.mtp_detach_heads": "policy.megatron_cfg.mtp_num_layers",
    "policy.megatron_cfg.linear_ce_fusion_chunk_size": "policy.megatron_cfg.use_linear_ce_fusion_loss",
    "policy.generation.sglang_cfg": "policy.generation.backend",
    "policy.generation.mcore_generation_config": "policy.generation.backend",
    "reward_penalties.token_ids.unwanted": "reward_penalties.penalize_unwanted_tokens",
    "reward_penalties.token_ids.think_open": "reward_penalties.penalize_malformed_think_tag",
    "reward_penalties.token_ids.think_close": "reward_penalties.penalize_malformed_think_tag",
    "logger.swanlab.project": "logger.swanlab_enabled",
    "logger.swanlab.name": "logger.swanlab_enabled",
}
"""Keys that mean something only beside another one, which is refused or has a notice."""


def structs_of(wanted: inspect.Type) -> Iterator[StructType]:
    """Yield the sections of a field's type: its own, those of a union, and those of items."""
    if isinstance(wanted, StructType):
        yield wanted
    for inner in getattr(wanted, "types", ()):
        yield from structs_of(inner)
    if isinstance(wanted, inspect.VarTupleType):
        yield from structs_of(wanted.item_type)
    if isinstance(wanted, inspect.DictType):
        yield from structs_of(wanted.value_type)


@cache
def keys() -> dict[str, tuple[type[ConfigSection], str]]:
    """Return the section and field of each key that is not a section; of several keys of one field, the first."""
    found: dict[str, tuple[type[ConfigSection], str]] = {}
    seen: set[tuple[type[ConfigSection], str]] = set()

    def walk(described: StructType, prefix: str) -> None:
        for field in described.fields:
            inner = [*structs_of(field.type)]
            for each in inner:
                walk(each, f"{prefix}{field.encode_name}.")
            place = (_declaring(described.cls, field.name), field.name)
            if not inner and place not in seen:
                seen.add(place)
                found[f"{prefix}{field.encode_name}"] = (described.cls, field.name)

    walk(config_type(), "")
    return found


def _declaring(section: type[ConfigSection], field: str) -> type[ConfigSection]:
    """Return the section whose reader reads a field: itself where each algorithm is read apart, else its first base."""
    if section.__name__ in _APART:
        return section
    bases = [each for each in section.__mro__ if issubclass(each, ConfigSection) and field in each.__struct_fields__]
    return bases[-1]


_APART = (
    "GrpoConfig",
    "PpoConfig",
    "DistillationConfig",
    "OffPolicyDistillation",
    "LossFn",
    "AsyncGrpo",
    "AsyncPpo",
    "PeftConfig",
)
"""Sections that inherit keys, each of which needs a reader of its own."""


@cache
def read_keys() -> frozenset[str]:
    """Return the keys that something with an effect reads."""
    readers = readers_of()
    return frozenset(
        key
        for key, (owner, field) in keys().items()
        if any((each.__name__, field) in readers for each in owner.__mro__ if issubclass(each, ConfigSection))
    )


_ROWS = frozenset(row.key for row in (*MOOT, *NOT_SUPPORTED_YET, *NO_EFFECT_YET))
"""Keys of the tables of notices and refusals."""


@cache
def told_keys() -> frozenset[str]:
    """Return the keys of notices and refusals: of the tables, and those that a notice names and reads."""
    notices = CONFIG / "notice_rules.py"
    texts = [node.value for node in ast.walk(ast.parse(notices.read_text())) if isinstance(node, ast.Constant)]
    words = {str(text).rpartition(".")[2] for text in texts}
    read = {(read.section, read.name) for read in all_reads() if read.path == notices}
    named = {key for key, (owner, field) in keys().items() if field in words and _is_among(owner, field, read)}
    return _ROWS | named


def _is_among(owner: type[ConfigSection], field: str, read: set[tuple[type[ConfigSection], str]]) -> bool:
    return any((each, field) in read for each in owner.__mro__)


def is_told(key: str) -> bool:
    """Tell whether a key, the section that it is in, or the switch of that section, is refused or has a notice."""
    parts = key.split(".")
    within = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return key in told_keys() or any(each in _ROWS or f"{each}.enabled" in _ROWS for each in within)


def test_every_key_is_read_or_told_of() -> None:
    known = {*OTHERWISE, *CHECKED, *ALWAYS, *OF_OTHERS}
    silent = [
        key
        for key in keys()
        if key not in read_keys() and key not in known and key.partition(".")[0] not in known and not is_told(key)
    ]
    assert not silent, f"accepted, read by nothing, and without a notice: {', '.join(silent)}"


@pytest.mark.parametrize("key", OTHERWISE)
def test_what_is_read_in_another_way_is_read_there(key: str) -> None:
    file, text = OTHERWISE[key]
    assert key in keys()
    assert text in (ROOT / file).read_text()


@pytest.mark.parametrize("key", CHECKED)
def test_what_a_rule_decides_is_read_by_it(key: str) -> None:
    owner, field = keys()[key]
    read = {(read.section, read.name) for read in all_reads() if read.path == CONFIG / CHECKED[key]}
    assert _is_among(owner, field, read)


def test_the_tables_have_no_row_too_many() -> None:
    for table in (OTHERWISE, CHECKED, ALWAYS, OF_OTHERS):
        for key in table:
            assert key not in read_keys(), f"{key} is read: strike its row"
            assert key == "teachers" or key in keys(), f"there is no {key}"
    for key, other in OF_OTHERS.items():
        assert other in told_keys(), f"{key} goes by {other}, which has no notice"


def test_the_finder_sees_what_it_must() -> None:
    """Count what it finds, so that a reader that finds nothing, or everything, fails."""
    assert len(keys()) > 600
    assert 0.6 < len(read_keys()) / len(keys()) < 0.9
    for key in (
        "grpo.num_prompts_per_step",
        "policy.optimizer.kwargs",
        "loss_fn.ratio_clip_min",
        "dpo.sft_loss_weight",
    ):
        assert key in read_keys()
    for key in (
        "grpo.val_batch_size",
        "policy.megatron_cfg.empty_unused_memory_level",
        "loss_fn.uncommon_topk",
        "data.seed",
    ):
        assert key not in read_keys()
        assert is_told(key)
