"""Experts chosen by the engine, as a column of samples; trainers send tokens to the same experts.

Rollout routing replay (R3; Ma et al. 2025, arXiv:2510.11370). For each token, the column has the experts of every
layer of the model. They are unknown in layers without experts, and for tokens that no engine has computed, such as
the last of a sample; there the trainer's own routers choose.

Shapes: ``T`` tokens, ``L`` layers, ``K`` experts per token; ``X`` bytes that encode ``L * K`` expert numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import ConfigError, SamplesError, WireError
from tandem.config.models.model_sizes import ExpertSizes, read_expert_sizes, read_model_config
from tandem.samples.batch import MASKS, MEDIA, SAMPLES, SampleBatch

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.config.schema.columns import Model

COLUMN = "routed_experts_TX"
"""Name of the column, in samples and in the batches of a rank."""
DTYPE = "uint8"
"""Element type of the column, regardless of the size of expert numbers."""
DTYPES = {COLUMN: DTYPE}
"""Element type by the name of the column."""
FILL = 2**8 - 1
"""Byte of the column where experts are unknown."""
Bytes = NDArray[np.uint8]


class RoutedExperts(ExpertSizes, frozen=True, kw_only=True):
    """The format of a model's column."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of expert numbers."""
        return np.dtype(f"u{self.bytes_of_expert}")

    @property
    def unknown(self) -> int:
        """Number for an unknown expert."""
        return int(np.iinfo(self.dtype).max)

    def nothing(self, num_tokens: int) -> Bytes:
        """Return the column of tokens with unknown experts."""
        return np.full((num_tokens, self.num_bytes), FILL, dtype=np.uint8)

    def encode(self, experts_TLK: NDArray[Any]) -> Bytes:
        """Return the column for these experts; negative numbers are unknown."""
        known_TLK = np.where(experts_TLK < 0, self.unknown, experts_TLK).astype(self.dtype)
        return known_TLK.reshape(len(known_TLK), -1).view(np.uint8)

    def decode(self, experts_TX: Bytes) -> NDArray[np.int16]:
        """Return the experts of each token and layer, -1 where they are unknown."""
        numbers_TE = np.ascontiguousarray(experts_TX).view(self.dtype)
        known_TE = np.where(numbers_TE == self.unknown, -1, numbers_TE.astype(np.int32))
        return known_TE.astype(np.int16).reshape(-1, self.num_layers, self.top_k)

    def decode_rows(self, experts_BTX: Bytes) -> NDArray[np.int16]:
        """Return the experts of each padded token and layer, as `decode` does."""
        return self.decode(experts_BTX.reshape(-1, self.num_bytes)).reshape(*experts_BTX.shape[:2], -1, self.top_k)

    def make_columns(self, routings: Iterable[Bytes], num_tokens: int) -> dict[str, Bytes]:
        """Return the column of a sequence, as `of_sequence` makes it, by its name."""
        return {COLUMN: self.of_sequence(routings, num_tokens)}

    def of_sequence(self, routings: Iterable[Bytes], num_tokens: int) -> Bytes:
        """Return the column of a sequence from the engine's routing of each response in turn.

        Each entry of `routings` covers the tokens from the first on. The first entry that knows a token is used for it,
        since later tokens were generated from that routing.
        """
        whole_TX, num_known = self.nothing(num_tokens), 0
        for experts_TX in routings:
            whole_TX[num_known : len(experts_TX)] = experts_TX[num_known:]
            num_known = max(num_known, len(experts_TX))
        return whole_TX

    def check(self, experts_TX: Bytes) -> None:
        """Raise `WireError` unless a column fits this model."""
        if experts_TX.shape[1] != self.num_bytes:
            raise WireError(f"{COLUMN}: {experts_TX.shape[1]} bytes a token, must be {self.num_bytes}")
        experts_TLK = self.decode(experts_TX)
        if int(experts_TLK.max(initial=-1)) >= self.num_experts:
            raise WireError(f"{COLUMN}: expert {experts_TLK.max()}, must be less than {self.num_experts}")
        sorted_TLK = np.sort(experts_TLK, axis=2)
        is_unknown_TL = sorted_TLK[:, :, -1] < 0
        is_twice_TL = (sorted_TLK[:, :, 1:] == sorted_TLK[:, :, :-1]).any(axis=2)
        if ((is_twice_TL | (sorted_TLK[:, :, 0] < 0)) & ~is_unknown_TL).any():
            raise WireError(f"{COLUMN}: a token has an expert twice in a layer, or fewer than {self.top_k}")


def as_trained_on(recorded: SampleBatch, experts: RoutedExperts | None, *, keeps_masks: bool = False) -> SampleBatch:
    """Return samples of a record as a run trains on them, which may replay nothing. Raises `SamplesError`."""
    if experts is not None and COLUMN not in recorded.columns:
        raise SamplesError("the rollout log has no routed experts: policy.router_replay was off")
    if keeps_masks and MASKS[0] not in recorded.columns:
        raise SamplesError(
            "the rollout log has no sampling masks: policy.generation had neither top_p, top_k nor min_p, or the log "
            "is of an earlier release"
        )
    optional = [*MEDIA, *(MASKS if keeps_masks else ()), *(() if experts is None else (COLUMN,))]
    return recorded.only([*SAMPLES, *(name for name in optional if name in recorded.columns)])


def experts_in(model: Mapping[str, Any]) -> RoutedExperts | None:
    """Return the column format for a model's ``config.json``; None for a model without experts."""
    sizes = read_expert_sizes(model)
    return None if sizes is None else RoutedExperts(**msgspec.structs.asdict(sizes))


def replayed_experts(config: Config, model_name: Model = "policy") -> RoutedExperts | None:
    """Return the column format for one of a run's models; None if it replays nothing.

    The reference is the policy before any training, and has its experts. Raises `ConfigError` if they are not known.
    """
    policy = config.policy
    if not policy.router_replay.enabled or model_name not in ("policy", "reference"):
        return None
    model = read_model_config(policy)
    if model is None:
        raise ConfigError(
            f"policy.router_replay.enabled: true, but {policy.model_name} is not on this machine, so that its experts "
            "are not known"
        )
    experts = experts_in(model)
    assert experts is not None, "the configuration's checks refuse it"
    return experts
