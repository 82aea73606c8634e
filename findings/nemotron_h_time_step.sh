#!/usr/bin/env bash
# Transformers 5.24.0's Nemotron-H makes other logits token by token than in one pass: a limit is left out.
#
# Behaviour: its state-space layers limit a time step from below (`time_step_min`, 0.001 by default) in a pass over
# several tokens. In a pass over one token that goes on from a cache they do not. So `generate` draws from a
# distribution that training, which makes one pass over the whole sequence, does not compute. With a limit next to
# zero both are equal within rounding.
# Surprise: the limit belongs to the model (its configuration has it), the other families of state-space layers take
# theirs from `time_step_limit`, which is no limit by default, and nothing says that a cache changes the numbers.
# Seen:
#   time_step_min 0.5: apart by more than 0.001
#   time_step_min 1e-09: equal within 1e-5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6
cd "$folder"

cat >compare.py <<'PYTHON'
import torch
import transformers

for least in (0.5, 1e-9):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "nemotron_h",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        initializer_range=0.3,
        time_step_min=least,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            torch.nn.init.constant_(module.dt_bias, -2.0)
    tokens = torch.randint(1, 61, (1, 24))
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        expected = model(tokens).logits[0, 12:]
        model(tokens[:, :12], past_key_values=cache, use_cache=True)
        rows = [model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0, 0] for i in range(12, 24)]
    apart = (torch.stack(rows) - expected).abs().max().item()
    print(f"time_step_min {least}: " + ("equal within 1e-5" if apart < 1e-5 else "apart by more than 0.001" if apart > 1e-3 else f"{apart} apart"))
PYTHON
TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" compare.py 2>/dev/null | tee seen
diff seen - <<'SEEN'
time_step_min 0.5: apart by more than 0.001
time_step_min 1e-09: equal within 1e-5
SEEN
