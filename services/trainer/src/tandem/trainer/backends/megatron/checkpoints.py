"""Checkpoints of the Megatron-Core backend: Hugging Face's format, and boxes of tensors.

Megatron-Core's own `dist_checkpointing` is not used, because it does not keep three promises of this project:

- Its ``torch_dist`` format keeps a pickled index (``.metadata``), which is unpickled to read a checkpoint.
- To write an optimizer's state for resharding, every data-parallel rank gathers its replica's whole state. To read it,
  every rank reads all of it. Another expert-parallel size cannot read it.
- On resuming with torch's AdamW, all parameters share one counter of steps (`optimizer_state`).

Here both folders use the checkpoint's own coordinates, which the layout knows. Every rank writes the elements it owns
and reads the elements it needs. TP, PP, virtual stages, EP, ETP, CP, DP, the distributed optimizer and the padding of
the vocabulary may all change in between. All files are safetensors and JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.common.errors import CheckpointError, ModelError
from tandem.config.schema.columns import Model
from tandem.trainer.backends.megatron import optimizer_state
from tandem.trainer.backends.megatron.weights import CheckpointTensors, RankWeights, SafetensorsFolder
from tandem.trainer.files import checkpoints
from tandem.trainer.files.box_files import BoxFiles


def load_model(
    folder: Path, weights: RankWeights, model: Model, opened: Callable[[Path], CheckpointTensors] = SafetensorsFolder
) -> None:
    """Fill the parameters of a model from a checkpoint, in their own memory; `opened` opens its files.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """

    def load() -> None:
        try:
            weights.load(opened(folder / model))
        except ModelError as error:
            raise CheckpointError(str(error)) from error

    checkpoints.agree(load)


def load_optimizer(folder: Path, weights: RankWeights, optimizer: Any, model: Model) -> checkpoints.OptimizerCounts:
    """Fill a model's optimizer from a checkpoint; return the number of steps that it has taken, and its schedule.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """
    counts = checkpoints.agree(lambda: checkpoints.read_counts(folder, model))

    def read(files: BoxFiles) -> None:
        optimizer_state.read(optimizer, weights, files, counts.steps)

    checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, model))
    return counts
