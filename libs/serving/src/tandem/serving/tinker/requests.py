"""The JSON bodies of the protocol, as the SDK sends them. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

SDK_VERSION = "0.38"
"""Release of the SDK whose protocol this is."""

Id = Annotated[str, Meta(min_length=1, max_length=200)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NumTop = Annotated[int, Meta(ge=0, le=20)]
Metadata = dict[str, Any]


class TinkerRefused(Exception):
    """A request that is not carried out, with an HTTP status and a line for the client."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all bodies."""


class ClientConfig(_Body, frozen=True, kw_only=True):
    """``client/config`` and ``client/dynamic_config``."""

    sdk_version: Annotated[str, Meta(max_length=100)]


class CreateSession(_Body, frozen=True, kw_only=True):
    """``create_session``."""

    sdk_version: Annotated[str, Meta(max_length=100)]


class OfSession(_Body, frozen=True, kw_only=True):
    """``session_heartbeat``."""

    session_id: Id


class LoraConfig(_Body, frozen=True, kw_only=True):
    """Adapters that a client asks for."""

    rank: int


class TinkerOptimizerConfig(_Body, frozen=True, kw_only=True):
    """An optimizer that a client asks for."""

    type: str = "adamw"


class CreateModel(_Body, frozen=True, kw_only=True):
    """``create_model``."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: TinkerOptimizerConfig = TinkerOptimizerConfig()


class OfModel(_Body, frozen=True, kw_only=True):
    """``get_info``."""

    model_id: Id


class AdamParams(_Body, frozen=True, kw_only=True):
    """Arguments of a step of AdamW."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(_Body, frozen=True, kw_only=True):
    """``optim_step``."""

    model_id: Id
    seq_id: Number
    adam_params: AdamParams | None = None


class SaveWeights(_Body, frozen=True, kw_only=True):
    """``save_weights``."""

    model_id: Id
    seq_id: Number
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveExternal(_Body, frozen=True, kw_only=True):
    """``save_weights_external``."""

    model_id: Id
    seq_id: Number
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: Any = None


class SetTtl(_Body, frozen=True, kw_only=True):
    """``training_runs/MODEL/checkpoints/NAME/ttl``."""

    ttl_seconds: int | None


class SaveForSampler(_Body, frozen=True, kw_only=True):
    """``save_weights_for_sampler``."""

    model_id: Id
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None


class LoadWeights(_Body, frozen=True, kw_only=True):
    """``load_weights``: into a model, or into a new one of a session."""

    path: Annotated[str, Meta(max_length=1000)]
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: TinkerOptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(_Body, frozen=True, kw_only=True):
    """``create_sampling_session``."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(_Body, frozen=True, kw_only=True):
    """Parameters of samples."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0


class PromptChunk(_Body, frozen=True, kw_only=True):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[TokenId] = []


class ModelInput(_Body, frozen=True, kw_only=True):
    """A prompt."""

    chunks: list[PromptChunk]


class SampleRequest(_Body, frozen=True, kw_only=True):
    """``asample``."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: NumTop = 0
    topk_sample_logprobs: NumTop = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(_Body, frozen=True, kw_only=True):
    """``retrieve_future``."""

    request_id: Id


class FuturesTarget(_Body, frozen=True, kw_only=True):
    """A client of a sampling session."""

    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class RetrieveMany(_Body, frozen=True, kw_only=True):
    """``retrieve_futures``."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Meta(ge=0.0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Meta(max_length=1 << 16)] = []


class WeightsInfo(_Body, frozen=True, kw_only=True):
    """``weights_info``."""

    tinker_path: Annotated[str, Meta(max_length=1000)]


Body = TypeVar("Body", bound=_Body)


def read(body: bytes, kind: type[Body]) -> Body:
    """Read a body. Raises `TinkerRefused`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise TinkerRefused(str(error), 422) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TinkerRefused(f"the body is no JSON: {error}") from error


def check_version(version: str) -> None:
    """Raise `TinkerRefused` for an SDK of another release."""
    if version.split(".")[:2] != SDK_VERSION.split("."):
        raise TinkerRefused(
            f"this server speaks the protocol of tinker {SDK_VERSION}, and the client is tinker {version[:50]}: "
            f"pip install tinker=={SDK_VERSION}.0"
        )
