#!/usr/bin/env bash
# PEFT 0.21.2's all-linear gives shared experts, and dense layers beside routed experts, no adapters.
#
# Behaviour: with `target_modules="all-linear"` on a model whose routed experts Transformers 5 has fused in parameters,
# PEFT replaces the names gate_proj, up_proj and down_proj by those parameters. Linear layers that have these names
# too, in dense layers and in shared experts, are left without an adapter.
# Surprise: the documentation of `target_modules` says that all linear layers but the output layer are chosen; nothing
# warns, and with Transformers 4 the same word chose them.
# Seen:
#   no adapter: model.layers.0.mlp.down_proj
#   no adapter: model.layers.0.mlp.gate_proj
#   no adapter: model.layers.0.mlp.up_proj
#   no adapter: model.layers.1.mlp.shared_experts.down_proj
#   no adapter: model.layers.1.mlp.shared_experts.gate_proj
#   no adapter: model.layers.1.mlp.shared_experts.up_proj
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cd "$folder"

cat >layers.py <<'PYTHON'
import torch
import transformers
from peft import LoraConfig, get_peft_model

config = transformers.AutoConfig.for_model(
    "glm4_moe",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
model = transformers.AutoModelForCausalLM.from_config(config)
linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "lm_head"]
adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
names = {name.removeprefix("base_model.model.") for name, _ in adapted.named_modules()}
assert "model.layers.1.mlp.experts.lora_A" in names
for name in sorted(linear):
    if f"{name}.lora_A" not in names:
        print("no adapter:", name)
PYTHON
TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" layers.py 2>/dev/null | tee seen
diff seen - <<'SEEN'
no adapter: model.layers.0.mlp.down_proj
no adapter: model.layers.0.mlp.gate_proj
no adapter: model.layers.0.mlp.up_proj
no adapter: model.layers.1.mlp.shared_experts.down_proj
no adapter: model.layers.1.mlp.shared_experts.gate_proj
no adapter: model.layers.1.mlp.shared_experts.up_proj
SEEN
