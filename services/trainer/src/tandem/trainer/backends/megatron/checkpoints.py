"""Checkpoints of the Megatron-Core backend: ``policy/`` in Hugging Face's format, ``optimizer/`` in boxes of tensors.

Megatron-Core's own `dist_checkpointing` is not used, because it does not keep three promises of this project:

- its ``torch_dist`` format keeps a pickle of what is where (``.metadata``), which reading a checkpoint unpickles;
- to write an optimizer's state so that it can be resharded, every data-parallel rank gathers all of its replica's, and
  to read it, every rank reads all of it; what a rank of expert parallelism wrote, another size of it cannot read;
- resuming with torch's AdamW, all parameters get one and the same counter of steps (`optimizer_state`).

Here both folders are in the checkpoint's own coordinates, which the layout knows: every rank writes the elements it
owns and reads the elements it needs, and any of TP, PP, virtual stages, EP, ETP, CP, DP, the distributed optimizer and
the padding of the vocabulary may have changed in between. All files are safetensors and JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tandem.common.config import Config
from tandem.common.errors import CheckpointError, ModelError
from tandem.trainer import box_files, checkpoints
from tandem.trainer.backends.megatron import optimizer_state
from tandem.trainer.backends.megatron.sources import SafetensorsFolder
from tandem.trainer.backends.megatron.weights import RankWeights

_COUNTS = "optimizer.json"
_NUM_STEPS = "num_optimizer_steps"


def save(folder: Path, described: Any, weights: RankWeights, optimizer: Any, num_steps: int, config: Config) -> int:
    """Write ``policy/`` and ``optimizer/`` under `folder`; return the bytes this rank wrote.

    Collective. Raises `CheckpointError`; every rank raises if one does.

    Args:
        folder: of the checkpoint.
        described: the model without weights (`tandem.trainer.models.without_weights`).
        weights: of this rank.
        optimizer: of Megatron-Core.
        num_steps: that the optimizer has taken.
        config: of the run.
    """
    gathered = weights.gathered()
    num_bytes = checkpoints.agree(lambda: checkpoints.write_policy(folder, described, gathered, config))
    return num_bytes + checkpoints.agree(lambda: _write_optimizer(folder, weights, optimizer, num_steps))


def load_policy(folder: Path, weights: RankWeights) -> None:
    """Fill the parameters with the policy that `save` wrote, in the memory they lie in.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """

    def load() -> None:
        try:
            weights.load(SafetensorsFolder(folder / checkpoints.POLICY))
        except ModelError as error:
            raise CheckpointError(str(error)) from error

    checkpoints.agree(load)


def load_optimizer(folder: Path, weights: RankWeights, optimizer: Any) -> int:
    """Fill an optimizer of the same parameters with what `save` wrote; return the number of steps it has taken.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """
    return checkpoints.agree(lambda: _read_optimizer(folder, weights, optimizer))


def _write_optimizer(folder: Path, weights: RankWeights, optimizer: Any, num_steps: int) -> int:
    target = folder / checkpoints.OPTIMIZER
    with checkpoints.as_checkpoint_error(f"cannot write {target}"):
        parts = optimizer_state.parts_of(optimizer, weights)
        paths = box_files.write(target, dist.get_rank(), parts, checkpoints.MAX_FILE_BYTES)
        if dist.get_rank() == 0:
            paths.append(target / _COUNTS)
            paths[-1].write_text(json.dumps({_NUM_STEPS: num_steps}) + "\n")
        num_bytes = checkpoints.sync(paths)
        checkpoints.sync_folder(target)
        checkpoints.sync_folder(folder)
        return num_bytes


def _read_optimizer(folder: Path, weights: RankWeights, optimizer: Any) -> int:
    source = folder / checkpoints.OPTIMIZER
    with checkpoints.as_checkpoint_error(f"cannot read {source}"):
        files = box_files.BoxFiles(source)
        num_steps = int(json.loads((source / _COUNTS).read_bytes())[_NUM_STEPS])
        optimizer_state.read(optimizer, weights, files, num_steps)
        return num_steps
