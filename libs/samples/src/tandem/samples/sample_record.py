"""The rollout log: the samples that a run trained on, in files that pandas reads.

    RUN/samples/step-00000012.rollout-0.parquet                      a shard: one rollout's samples of a training
    step
    RUN/samples/validation-00000010.rollout-0.parquet                the same for a step's validation
    RUN/samples/logprobs/step-00000012.trainer-0.parquet             log-probabilities under the policy in training
    RUN/samples/unfinished/step-00000012.rollout-0.3f9a.arrows       finished samples of a step not trained on yet

A row is a sample. A shard gets its name once it is complete. It has a digest of all its bytes, and its pages have
checksums for partial reads. An unfinished file is an Arrow stream that only grows: whatever happens to its writer,
all complete batches can be read. Each file names its run in its metadata, and files of another run are never read.

`tandem.samples.sample_writing` writes it and reads unfinished files; `tandem.samples.recorded_shards` reads shards.

Torch is not imported here: the coordinator itself reads the rollout log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.common.messages import Branch, SampleScored
from tandem.samples.batch import DIGEST_BYTES, GRID_SIZES, SAMPLES, SampleBatch

FORMAT = 5
"""Format number, raised when the meaning of a column or the requirements of a file change."""
EXPERTS = "routed_experts"
"""Column of bytes with each token's experts (`tandem.samples.routed_experts`); null if no routing is replayed."""
RUN_ID, FORMAT_KEY, DIGEST = b"tandem.run_id", b"tandem.format", b"tandem.digest"
"""Keys of a file's metadata."""
NO_DIGEST = b"digest-goes-here"
"""Placeholder of the same length, in place of the digest while it is computed."""
UNREADABLE = OSError, pa.ArrowException, UnicodeDecodeError
"""Errors of Arrow for a file that is missing, has another format, or is damaged."""
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("problem_id", pa.string()),
        ("question", pa.string()),
        ("reference_answer", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("spent", pa.map_(pa.string(), pa.float64())),
        ("correct", pa.bool_()),
        ("extracted_answer", pa.string()),
        ("advantage", pa.float32()),
        ("finish_reason", pa.string()),
        ("num_turns", pa.int64()),
        ("failure", pa.string()),
        ("timed_out", pa.bool_()),
        ("dropped", pa.bool_()),
        ("prompt_length", pa.int64()),
        ("response_length", pa.int64()),
        ("num_tokens", pa.int64()),
        ("branches", pa.list_(pa.struct([(name, pa.int64()) for name in Branch.__struct_fields__]))),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("tokens_by_version", pa.list_(pa.int64())),
        ("rollout", pa.string()),
        ("command_id", pa.int64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("generation_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        (EXPERTS, pa.large_binary()),
    ]
)
"""Columns of every file of samples; ``docs/samples.md`` describes them."""
MEDIA_COLUMN = "images"
_IMAGE = pa.struct([("digest", pa.binary()), ("grid", pa.list_(pa.int32())), ("branch", pa.int32())])
SAMPLING_MASKS = "sampling_masks"
"""Column of bytes with each token's sampling mask (`tandem.samples.sampling_masks`): the lengths of all, then their
words."""
ROLES, ROLE_REWARDS = "roles", "role_rewards"
"""Columns with the role of each branch, and the reward of each role."""
_OPTIONAL = {
    MEDIA_COLUMN: pa.field(MEDIA_COLUMN, pa.list_(_IMAGE)),
    SAMPLING_MASKS: pa.field(SAMPLING_MASKS, pa.large_binary()),
    ROLES: pa.field(ROLES, pa.list_(pa.int32())),
    ROLE_REWARDS: pa.field(ROLE_REWARDS, pa.list_(pa.float64())),
}
"""Columns of some runs' samples: each sample's images, the branches' end to end, where the model sees; masks where
engines cut distributions off; roles where the policy plays several."""


def write_media(sample: RecordedSample) -> list[dict[str, Any]]:
    """Return the images of a sample as a row has them: those of its branches end to end."""
    digests = map(np.ndarray.tobytes, sample.arrays.image_digests_IX)
    grids = sample.arrays.image_grids_IX.tolist()
    counts = sample.arrays.num_images_S
    branches = np.repeat(np.arange(len(counts)), counts).tolist()
    return [
        {"digest": digest, "grid": grid, "branch": branch}
        for digest, grid, branch in zip(digests, grids, branches, strict=True)
    ]


def read_media(images: list[dict[str, Any]] | None, num_branches: int) -> dict[str, NDArray[Any]]:
    """Return the columns (`tandem.samples.batch.MEDIA`) of a row's images; none if the row has no such column."""
    if images is None:
        return {}
    digests = np.frombuffer(b"".join(image["digest"] for image in images), dtype=np.uint8)
    branch_I = np.array([image["branch"] for image in images], dtype=np.int64)
    return {
        "num_images_S": np.bincount(branch_I, minlength=max(1, num_branches)).astype(np.int32),
        "image_digests_IX": digests.reshape(-1, DIGEST_BYTES),
        "image_grids_IX": np.array([image["grid"] for image in images], dtype=np.int32).reshape(-1, GRID_SIZES),
    }


def schema_with(optional: Mapping[str, bool]) -> pa.Schema:
    """Return the columns of samples that have some of the optional columns, or others."""
    return pa.schema([*SCHEMA, *(field for name, field in _OPTIONAL.items() if optional.get(name))])


LOGPROBS_SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("step", "group", "sample", "branch")),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
"""Columns of every file of log-probabilities: one for each token of the sequence, NaN where the trainer has none."""
ARRAYS = {name.removesuffix("_T"): name for name in SAMPLES if name.endswith("_T")}
"""The array of a batch that a column has."""
WITHOUT_ARRAYS = tuple(name for name in SCHEMA.names if name not in (*ARRAYS, EXPERTS))
"""Columns without a value for each token."""


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that is known of a finished sample; its step can be trained on again from it."""

    step: int
    rollout: str
    """Rollout that generated it."""
    command_id: int
    """Id of the command that it was generated for."""
    scored: SampleScored
    """With the text of the response."""
    arrays: SampleBatch
    """Arrays of this one sequence, or of each of an agent's branches."""
    advantage: float | None = None
    """Its advantage; None if the sample was not trained on, for example if dynamic sampling filtered out its group."""
    problem_id: str
    question: str
    answer: str
    """Reference answer; empty if there is none."""
    prompt: str
    """The prompt as the model saw it: decoded from its tokens, including special ones."""
    started_at: float
    """Unix time at which the rollout was asked for it."""
    finished_at: float
    """Unix time of its last reward."""
