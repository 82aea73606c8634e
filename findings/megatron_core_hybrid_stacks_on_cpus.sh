#!/usr/bin/env bash
# Megatron-Core 0.16.1 builds no Mamba layer and no gated delta net without kernels for GPUs.
#
# Behaviour: its hybrid model of state-space layers (`MambaModel`) cannot be imported without Triton, which it does not
# require. With Triton installed, a Mamba layer stops at `mamba_ssm`, and a gated delta net at `fla`, in
# `deterministic_mode` too, for which its module has an implementation in plain torch. 0.19.2 has the same guards.
# Surprise: on a CPU its GPT model computes the same as on a GPU, so that layouts and gradients can be tested there;
# of hybrid stacks nothing can, although torch alone would do.
# Seen:
#   without triton:
#   MambaModel: ModuleNotFoundError: No module named 'triton'
#   GatedDeltaNet: ImportError: FLA is not installed. Please install it with `pip install flash-linear-attention`.
#   with triton:
#   MambaModel: ImportError: MambaSSM is not installed. Please install it with `pip install mamba-ssm`.
#   GatedDeltaNet: ImportError: FLA is not installed. Please install it with `pip install flash-linear-attention`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6 einops
cd "$folder"

cat >build.py <<'PYTHON'
import os
import warnings

warnings.simplefilter("ignore")
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True}


def build_stack():
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    layer = mamba_stack_spec.submodules.mamba_layer.submodules
    layer.norm = WrappedTorchNorm
    layer.mixer.submodules.in_proj, layer.mixer.submodules.out_proj = ColumnParallelLinear, RowParallelLinear
    return MambaModel(
        TransformerConfig(**SIZES),
        mamba_stack_spec,
        vocab_size=64,
        max_sequence_length=32,
        hybrid_override_pattern="MM",
    )


def build_delta_net():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    parts = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    config = TransformerConfig(
        **SIZES,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        deterministic_mode=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)


os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677", "WORLD_SIZE": "1", "RANK": "0"}
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
for name, build in (("MambaModel", build_stack), ("GatedDeltaNet", build_delta_net)):
    try:
        build()
        print(f"{name}: built")
    except ImportError as error:
        print(f"{name}: {type(error).__name__}: {str(error).partition(' when instantiating')[0]}")
PYTHON
"$folder/venv/bin/python" -m pip uninstall --quiet --yes triton >/dev/null 2>&1 || true
without=$("$folder/venv/bin/python" build.py 2>/dev/null)
"$folder/venv/bin/python" -m pip install --quiet --no-deps triton
with=$("$folder/venv/bin/python" build.py 2>/dev/null)
printf 'without triton:\n%s\nwith triton:\n%s\n' "$without" "$with"
grep -q "No module named 'triton'" <<<"$without"
grep -q "MambaSSM is not installed" <<<"$with"
grep -q "FLA is not installed" <<<"$with"
