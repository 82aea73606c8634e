"""The weights that the embedded engine wants: its live parameters, as tensors of the checkpoint."""

from __future__ import annotations

import torch

from tandem.refit.adapters.huggingface import as_checkpoint
from tandem.refit.layout import LayoutBuilder, whole
from tandem.refit.weights import Weights, device_name, host_name


def weights_of(model: torch.nn.Module) -> Weights:
    """Describe a model's live parameters, each a full slice in a private storage of its own. Tied ones appear once.

    Buffers that checkpoints contain are included, such as what routers add to their scores.
    """
    saved = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    builder = LayoutBuilder(host_name(), device_name(next(iter(tensors.values())).device))
    for name, tensor in tensors.items():
        size = tensor.element_size()
        index = builder.tensor(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        storage = builder.storage(name, tensor.numel() * size)
        builder.add(index, whole(tensor.shape), storage, 0, [stride * size for stride in tensor.stride()])
    return Weights(as_checkpoint(builder.build()), tensors)
