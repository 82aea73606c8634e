"""What processes of tests would each import and make anew: done once, in the processes that they are forked from.

Importing this module makes what libraries make once in a process as well: Transformers reads the conversions of all its
models' checkpoints, half a second of each trainer.
"""

from __future__ import annotations

import gc
import importlib

from tandem.common import gc_tuning
from tests.harness.runs import whole_pages

_MODULES = (
    "tandem.rollout.sample_recorder",
    "tandem.trainer.backends.dtensor",
    "tandem.samples.sample_writing",
    "tandem.trainer.losses.policy_gradient",
    "tandem.trainer.step",
    "tandem.refit.digests.kernels",
    "pandas",  # which Arrow imports with the first array that it makes
    "pyarrow.pandas_compat",
    "numpy.ctypeslib",
    "encodings.idna",
    "PIL.BmpImagePlugin",  # with the next four: a figure that is saved opens them
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "PIL.PngImagePlugin",
    "transformers.tokenization_utils_tokenizers",
    "tokenizers.trainers",
    "transformers.convert_slow_tokenizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tandem.trainer.backends.megatron.backend",  # last: Megatron-Core is not installed beside vLLM
)


def _make_once() -> None:
    """Have the rules of configurations made, the sources of a model read, and the names of tensors in checkpoints."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tandem.config import build_config

    new_model = {"characters": "01", "config": {"model_type": "qwen3"}}
    data = {"dataset_name": "reasoning_gym", "task": "chain_sum"}
    build_config({"algorithm": "grpo", "policy": {"model_name": "model", "new_model": new_model}, "data": data})
    get_checkpoint_conversion_mapping("qwen3")


with gc_tuning.pause_collection():
    _make_once()
    for _module in _MODULES:
        importlib.import_module(_module)
gc.freeze()  # or looking for garbage would make each process copy what was imported
whole_pages.collapse()
