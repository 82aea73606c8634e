"""Checkpoints of the Megatron-Core backend: Hugging Face's format, and boxes of tensors.

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

from pathlib import Path
from typing import Any

from tandem.common.errors import CheckpointError, ModelError
from tandem.config.schema.columns import Model
from tandem.trainer.backends.megatron import optimizer_state
from tandem.trainer.backends.megatron.sources import SafetensorsFolder
from tandem.trainer.backends.megatron.weights import RankWeights
from tandem.trainer.files import checkpoints
from tandem.trainer.files.box_files import BoxFiles


def load_model(folder: Path, weights: RankWeights, model: Model) -> None:
    """Fill the parameters of a model with what a checkpoint has of it, in the memory they lie in.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """

    def load() -> None:
        try:
            weights.load(SafetensorsFolder(folder / model))
        except ModelError as error:
            raise CheckpointError(str(error)) from error

    checkpoints.agree(load)


def load_optimizer(folder: Path, weights: RankWeights, optimizer: Any, model: Model) -> int:
    """Fill a model's optimizer with what a checkpoint has of it; return the number of steps it has taken.

    Collective. Raises `CheckpointError`; every rank raises if one does.
    """
    num_steps = checkpoints.agree(lambda: checkpoints.read_num_steps(folder, model))

    def read(files: BoxFiles) -> None:
        optimizer_state.read(optimizer, weights, files, num_steps)

    checkpoints.agree(lambda: checkpoints.read_optimizer(folder, read, model))
    return num_steps
