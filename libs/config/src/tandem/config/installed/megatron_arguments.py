"""Megatron-Core as installed, read from source without importing it: its release and its arguments."""

from __future__ import annotations

import ast
import functools
from typing import Any

from msgspec import inspect

from tandem.config.installed import sources

_CLASSES = {
    "": ("transformer/transformer_config.py", "MLATransformerConfig"),
    "optimizer": ("optimizer/optimizer_config.py", "OptimizerConfig"),
    "distributed_data_parallel_config": (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    ),
}
"""Class with the arguments of each section of ``policy.megatron_cfg``; empty for the section itself."""

_OF_THE_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels softmax_scale softmax_type
    window_size window_attn_skip_freq normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm
    qk_l2_norm apply_residual_connection_post_layernorm add_bias_linear add_qkv_bias gated_linear_unit activation_func
    glu_linear_offset activation_func_clamp_value attention_output_gate mtp_num_layers multi_latent_attention
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
    rotary_interleaved rotary_scaling_factor no_rope_freq original_max_position_embeddings beta_fast beta_slow mscale
    mscale_all_dim num_moe_experts moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_topk
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_score_function
    moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_shared_expert_intermediate_size
    moe_shared_expert_gate vocab_size max_sequence_length position_embedding_type rope_scaling rope_scaling_factor
    share_embeddings_and_output_weights experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads dsa_indexer_n_heads dsa_indexer_head_dim
    dsa_indexer_topk
    use_mup mup_width_mult mup_base_hidden_size mup_base_head_dim mup_embedding_mult mup_output_mult
    mup_attn_scale_power mtp_hybrid_override_pattern mtp_use_repeated_layer
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
"""
_OF_THE_PRECISION = "fp16 bf16 params_dtype autocast_dtype enable_autocast"
_OF_TANDEM = """
    calculate_per_token_loss variable_seq_lengths overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm
    microbatch_group_size_per_vp_stage max_seqlen_per_dp_cp_rank
    cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout
    fp8_param fp4_param heterogeneous_block_specs transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm
    hidden_dropout attention_dropout
    perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std embedding_init_method_std
    config_logger_dir test_mode quant_recipe
    mla_down_proj_fusion
    use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp moe_mlp_glu_interleave_size
    moe_single_grouped_weight moe_single_grouped_bias fp8_output_proj
    use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size gtp_weight_remat_size
    expert_gtp_weight_remat_size tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
"""
"""Arguments that Tandem sets. Other values of the first three lines give wrong gradients or none; of the next two, a
layout unknown to the weight plane. Dropout would change the log-probabilities in training. The two lines after it have
no use here. The rest is of 0.17, of 0.18 and of 0.19: layouts that the weight plane does not know."""

RESERVED: dict[str, dict[str, str]] = {
    "": {
        **dict.fromkeys(_OF_THE_MODEL.split(), "the model's config.json decides"),
        **dict.fromkeys(_OF_THE_PRECISION.split(), "set policy.precision instead"),
        **dict.fromkeys(_OF_TANDEM.split(), "Tandem sets it itself"),
    },
    "optimizer": {
        "config_logger_dir": "Tandem sets it itself",
        "overlap_param_gather": "set policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather instead",
        "use_layer_wise_distributed_optimizer": "its state cannot be saved",
        "grad_norm_skip_threshold": "Tandem takes the steps itself",
    },
    "distributed_data_parallel_config": {
        "use_distributed_optimizer": "set policy.megatron_cfg.optimizer.use_distributed_optimizer instead",
    },
}
"""Arguments that users may not set, with what to do instead, by section; of any known release."""

_PLAIN: dict[str, inspect.Type] = {
    "int": inspect.IntType(),
    "float": inspect.FloatType(),
    "bool": inspect.BoolType(),
    "str": inspect.StrType(),
    "None": inspect.NoneType(),
    # By name, as in YAML.
    "torch.dtype": inspect.LiteralType(("bfloat16", "float16", "float32")),
    "AttnBackend": inspect.LiteralType(("auto", "flash", "fused", "local", "unfused")),
}


@functools.cache
def list_arguments(section: str) -> dict[str, inspect.Type]:
    """Return the arguments of a section of ``policy.megatron_cfg``, by name; empty if Megatron-Core is not
    installed.

    Types that YAML cannot write plainly, such as enumerations, admit any value. Functions are left out.
    """
    root = sources.find_package("megatron.core")
    if root is None:
        return {}
    module, name = _CLASSES[section]
    argument_types: dict[str, inspect.Type] = {}
    for defined in sources.find_class_and_bases(root / module, name, root):
        for field, annotation in sources.find_annotated_fields(defined).items():
            if "Callable" not in ast.unparse(annotation):
                argument_types.setdefault(field, _describe_annotation(annotation))
    return argument_types


@functools.cache
def list_defaults(section: str) -> dict[str, object]:
    """Return the default of each argument of a section, a syntax tree where it is no literal."""
    root = sources.find_package("megatron.core")
    if root is None:
        return {}
    module, name = _CLASSES[section]
    by_name: dict[str, object] = {}
    for defined in sources.find_class_and_bases(root / module, name, root):
        for field in sources.find_annotated_fields(defined):
            by_name.setdefault(field, sources.find_default(defined, field))
    return by_name


def _describe_annotation(annotation: ast.expr) -> inspect.Type:
    """Convert an annotation to msgspec's description of a type."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _describe_union([inner, ast.Constant(None)])
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return _describe_union(members)
        case ast.BinOp(left=first, op=ast.BitOr(), right=second):
            return _describe_union([first, second])
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            nodes = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            values: tuple[Any, ...] = tuple(node.value for node in nodes if isinstance(node, ast.Constant))
            return inspect.LiteralType(values)
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            return inspect.VarTupleType(_describe_annotation(inner))
        case _:
            return _PLAIN.get(ast.unparse(annotation), inspect.AnyType())


def _describe_union(members: list[ast.expr]) -> inspect.Type:
    flat: list[inspect.Type] = []
    for member in map(_describe_annotation, members):
        flat += member.types if isinstance(member, inspect.UnionType) else [member]
    return inspect.AnyType() if inspect.AnyType() in flat else inspect.UnionType(tuple(flat))


RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Releases that are known here, by their first two numbers. The last patch release of each is tested."""

_IMPORTS_TRITON = ("0.18", "0.19")
"""Releases that import triton when they are imported, which torch's builds for CPUs do not bring."""


def is_installed() -> bool:
    """Tell whether Megatron-Core is installed."""
    return sources.find_package("megatron.core") is not None


def find_release() -> str | None:
    """Return the installed release; None if there is none, or it tells none."""
    package = sources.find_package("megatron.core")
    if package is None or not (package / "package_info.py").is_file():
        return None
    numbers: dict[str, object] = {}
    for node in sources.parse(package / "package_info.py").body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                numbers[name] = value
    release = ".".join(str(numbers.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
    return None if "?" in release else release


def is_among(release: str, releases: tuple[str, ...]) -> bool:
    """Tell whether a release, such as 0.16.1, is one of those that are given by their first two numbers."""
    return release.startswith(tuple(f"{first}." for first in releases))


def find_obstacle() -> str | None:
    """Say why the installed release cannot train here; None if it can, or tells no number."""
    release = find_release()
    if release is None:
        return None
    if not is_among(release, RELEASES):
        return f"Megatron-Core {release} is installed, and known releases are {', '.join(RELEASES)}"
    if is_among(release, _IMPORTS_TRITON) and sources.find_package("triton") is None:
        return f"Megatron-Core {release} imports triton, which is not installed: pip install triton"
    return None
