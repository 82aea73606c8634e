"""Generation: engines, their sizes, and sampling."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.engine_kinds import ENGINE_KINDS, EngineKind, EngineName
from tandem.config.schema.base import (
    ConfigSection,
    Fraction,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
)

ToolCallParser = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "mistral",
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "cohere_command3",
    "cohere_command4",
    "muse_glimmer",
    "glm45",
    "glm47",
    "kimi_k2",
    "gemma4",
    "lfm2",
]
"""Formats of tool calls, by vLLM's names."""


class TransformersCfg(ConfigSection, frozen=True, kw_only=True):
    """The embedded engine, which runs the model through the transformers library."""

    num_slots: PositiveInt
    """New. Sequences decoded at once by one engine; each holds a KV cache of `policy.max_total_sequence_length`."""
    adapter_sets: PositiveInt = 1
    """New. Same as `policy.generation.adapter_sets`, at its earlier place; the larger one holds."""


class MediaLimits(ConfigSection, frozen=True, kw_only=True):
    """Limits of a prompt besides its text, in NeMo-RL's files."""

    image: NonNegativeInt | None = None
    """Accepted: images. Here their tokens limit their number."""
    audio: NonNegativeInt | None = None
    """Sounds."""
    video: NonNegativeInt | None = None
    """Videos."""


class VllmCfg(ConfigSection, frozen=True, kw_only=True):
    """The vLLM engine; read only where `policy.generation.backend` is vllm."""

    precision: str
    """Element type of the engine's weights and activations. fp8: weights of linear layers in float8 with a scale for
    each block of 128 × 128, quantised at every refit from the trainer's weights; the rest in bfloat16."""
    max_model_len: PositiveInt
    """Longest sequence, prompt included."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer of one engine."""
    pipeline_parallel_size: PositiveInt = 1
    """GPUs that share the layers of one engine in sequence."""
    expert_parallel_size: PositiveInt = 1
    """GPUs that share the experts of each layer of one engine, each with whole experts."""
    gpu_memory_utilization: Fraction = 0.6
    """Fraction of GPU memory that the engine may use."""
    kv_cache_dtype: NonEmptyStr = "auto"
    """Element type of the KV cache, by vLLM's names; auto means that of the activations."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Initial weights of the engine. In both cases the weights come by refit, and none are read from a checkpoint."""
    enforce_eager: bool = False
    """Run without CUDA graphs; on a CPU there are none."""
    async_engine: bool = False
    """Same as `policy.generation.async_engine`, at NeMo-RL's place; applies to any engine."""
    expose_http_server: bool = False
    """Same as `policy.generation.expose_http_server`, at NeMo-RL's place; applies to any engine."""

    enable_prefix_caching: bool | None = None
    """Accepted: whether prompts with a common beginning share keys and values; null leaves it to vLLM. Here, samples
    of one prompt always share them."""
    enable_expert_parallel: bool | None = None
    """Accepted: whether ranks get whole experts. `expert_parallel_size` decides."""
    num_first_layers_in_bf16: NonNegativeInt = 0
    """With precision fp8: first layers that stay in bfloat16."""
    num_last_layers_in_bf16: NonNegativeInt = 0
    """With precision fp8: last layers that stay in bfloat16."""
    quantization_ignored_layer_kws: tuple[NonEmptyStr, ...] = ()
    """With precision fp8: layers with one of these in their name stay in bfloat16."""
    quantization_ignore_patterns: tuple[NonEmptyStr, ...] = ()
    """Same as `quantization_ignored_layer_kws`, with wildcards, in NeMo-RL 0.8."""
    use_deep_gemm: bool = False
    """Accepted: with precision fp8, multiply with DeepGEMM. vLLM chooses by itself."""
    env_vars: dict[str, Any] | None = None
    """Accepted: environment variables of NeMo-RL's engines. Set them where the run is started."""
    skip_tokenizer_init: bool | None = None
    """Accepted: whether vLLM has a tokenizer of its own. Here it has none and is given tokens."""
    distributed_executor_backend: NonEmptyStr | None = None
    """Accepted: how vLLM starts the ranks of an engine. Here the rollout process starts them."""
    limit_mm_per_prompt: MediaLimits | None = None
    """Images, sounds and videos that a prompt may have."""
    http_server_serving_chat_kwargs: dict[str, Any] | None = None
    """Accepted: arguments of vLLM's own server. Here, `expose_http_server` and `tool_call_parser` replace them. For
    agents of NeMo Gym, `tool_parser` with `enable_auto_tools` is the default of `tool_call_parser`."""
    reasoning_parser_plugin: NonEmptyStr | None = None
    """Accepted: a plugin of vLLM's own server."""
    enable_vllm_metrics_logger: bool = False
    """Accepted: log the engines' metrics. The metrics of each step include them."""
    logprobs_mode: NonEmptyStr | None = None
    """Accepted: stage of sampling whose log-probabilities vLLM returns. Here they are those that tokens are drawn with,
    `processed_logprobs` in vLLM's words, since training compares them with its own at the same temperature."""
    reset_encoder_cache_after_weight_update: bool | None = None
    """Accepted: whether vLLM forgets what its image encoder computed with older weights. Here it always does."""
    max_num_seqs: PositiveInt | None = None
    """Accepted: sequences that one engine decodes at once; `vllm_kwargs.max_num_seqs` decides."""
    enforce_monotonicity: bool | None = None
    """Accepted: check in NeMo-RL's server that an agent's prompts continue each other. Here they are independent."""
    enable_thinking: bool | None = None
    """Accepted: a variable of the chat template; `policy.tokenizer.chat_template_kwargs` decides."""
    tool_parser_plugin: NonEmptyStr | None = None
    """Accepted: a plugin of vLLM's own server."""
    vllm_metrics_logger_interval: PositiveFloat | None = None
    """Accepted: seconds between these logs."""
    use_tqdm: bool | None = None
    """Accepted: show vLLM's progress bar."""

    @cached_property
    def num_workers(self) -> int:
        """Processes that compute for one engine; a single one is the engine's own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ColocatedResources(ConfigSection, frozen=True, kw_only=True):
    """GPUs reserved for generation that is not colocated: some of a single node, or whole nodes of several.

    They are the last of the cluster. By default they follow those of the trainers.
    """

    gpus_per_node: PositiveInt | None = None
    """GPUs for generation, if `cluster.num_nodes` is 1; else null or `cluster.gpus_per_node`."""
    num_nodes: PositiveInt | None = None
    """Nodes for generation, if `cluster.num_nodes` is greater than 1; else null or 1."""


class ColocatedConfig(ConfigSection, frozen=True, kw_only=True):
    """Whether generation shares its devices with training."""

    enabled: bool = True
    """true: training and generation take turns on the same devices. Engines sleep between generations without a KV
    cache; trainers keep the optimizer's state on the device only during training. false: each side has devices of
    its own and keeps its memory; no engine reads the trainer's memory in place."""
    resources: ColocatedResources = ColocatedResources()


class GenerationConfig(ConfigSection, frozen=True, kw_only=True):
    """Settings of generation in algorithms that roll out; no other algorithm reads them."""

    backend: EngineName = "transformers"
    """The engine. NeMo-RL's base files have vllm; transformers is Tandem's own."""
    max_new_tokens: PositiveInt
    """Longest response, in tokens; applies to each of several turns."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits before sampling. Training uses the same."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: PositiveInt | None = None
    """Sample from this many likeliest tokens; null means all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """New. Sample from tokens with at least this share of the likeliest one's probability. It goes before `top_k` and
    `top_p`, as in vLLM, and holds for validation as well."""
    val_temperature: NonNegativeFloat | None = None
    """Same as `grpo.val_temperature`, at NeMo-RL 0.8's place."""
    val_top_p: Fraction | None = None
    """Like `top_p`, for validation; null means the same as in training."""
    val_top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Like `top_k`, for validation: 0 and -1 mean all tokens, null the same as in training."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response, beside the tokenizer's end-of-sequence token."""
    stop_strings: tuple[str, ...] | None = None
    """Texts that end a response."""
    tool_call_parser: ToolCallParser | None = None
    """New. Format of the model's tool calls, so that agents get them as `tool_calls`. auto: the format of the model's
    chat template. Others by vLLM's names: hermes (Qwen, Hermes: ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>``), qwen3_coder (Qwen 3.5, Nemotron 3), llama3_json (Llama 3: ``{"name": ..., "parameters":
    {...}}``), mistral, openai (GPT-OSS), deepseek_v3, deepseek_v32 (V3.2 to V4.1), cohere_command3, muse_glimmer,
    glm45, kimi_k2, gemma4, lfm2. null: they stay text."""
    adapter_sets: PositiveInt = 1
    """New. Versions of low-rank adapters that one engine holds beside the base, each request being made by the version
    that it names. 1: the newest version alone, merged into the weights. `coordinator tinker --models` sets it. With
    more than one, vLLM runs as with `vllm_cfg.enforce_eager`."""
    transformers_cfg: TransformersCfg
    vllm_cfg: VllmCfg
    vllm_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further arguments of vLLM's engine, by its own names; checked if vLLM is installed. `speculative_config` has
    tokens drafted and verified: `method` ngram, draft_model, eagle3 or mtp, `num_speculative_tokens`,
    `prompt_lookup_max`, `prompt_lookup_min`, and `model`, a folder or a name on the Hub. Refits write the draft's
    weights only where it is the layers that `policy.mtp` trains."""
    sglang_cfg: dict[str, Any] | None = None
    """Settings of SGLang; read only if `backend` is sglang."""
    mcore_generation_config: dict[str, Any] | None = None
    """Settings of Megatron-Core's own engine; read only if `backend` is megatron."""
    bad_words: tuple[NonEmptyStr, ...] | None = None
    """Texts that a response may not contain, at the beginning of a word or after a space. Only the tokens that the
    tokenizer makes of a text alone are forbidden, as by vLLM. Log-probabilities are of the remaining tokens, those of
    engines and those of training."""
    quant_cfg: NonEmptyStr | None = None
    """Quantise the engines' weights according to a file for NVIDIA's ModelOpt."""
    real_quant: bool = False
    """Whether `quant_cfg` shrinks the weights, or only rounds them."""
    refit_transport: NonEmptyStr | None = None
    """Accepted: how weights reach NeMo-RL's engines. Here the plan of the refit chooses the way of each piece."""
    refit_cfg: dict[str, Any] | None = None
    """Accepted: settings of that transport."""
    use_async_rollouts: bool | None = None
    """Accepted: an earlier name of `async_engine`, which decides."""
    port_range_low: Port | None = None
    """Accepted: the lowest port of NeMo-RL's engines. Here the system chooses free ports."""
    port_range_high: Port | None = None
    """Accepted: the highest such port."""
    async_engine: bool = False
    """Continue samples as soon as the environment has replied, while the engine generates others, and assign prompts
    to the engine with the fewest outstanding tokens. Without it, the engine waits for replies, and prompts are
    pinned to engines in turn, so that a run is reproducible to the bit."""
    expose_http_server: bool = False
    """Make every rollout process answer OpenAI's API during the run, with its current weights: `coordinator serve`
    and `coordinator chat` of the run folder are then answered by the run itself. External requests use the capacity
    that training leaves, and do not affect it."""
    generation_timeout: PositiveFloat | None = None
    """New. Seconds that an idle engine waits for others before it takes over their prompts; null means for ever.
    Needs `async_engine`."""
    max_stored_tokens: PositiveInt = 500_000_000
    """New. Most tokens of finished samples that one engine's process keeps until they are trained on: 13 bytes of
    host memory each, and with `top_p`, `top_k`, `min_p` or `bad_words` those of their sampling masks."""
    colocated: ColocatedConfig = ColocatedConfig()

    @cached_property
    def validation_top_p(self) -> float:
        """Probability that validation samples from."""
        return self.top_p if self.val_top_p is None else self.val_top_p

    @property
    def kind(self) -> EngineKind:
        """Declaration of the engine; that of the embedded one for an engine that is not built, while it is checked."""
        return ENGINE_KINDS.get(self.backend, ENGINE_KINDS["transformers"])

    def reads(self, section: str) -> bool:
        """Return whether the engine reads the settings of an engine in ``policy.generation``."""
        return self.backend in ENGINE_KINDS and self.kind.section == section

    @cached_property
    def validation_top_k(self) -> int | None:
        """Likeliest tokens that validation samples from; None means all."""
        return self.top_k if self.val_top_k is None else max(0, self.val_top_k) or None

    @cached_property
    def cuts_off(self) -> bool:
        """Whether training samples are drawn from some of the tokens only."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0 or bool(self.bad_words)

    @cached_property
    def is_async(self) -> bool:
        """Whether `async_engine` is on, at either place."""
        return self.async_engine or self.vllm_cfg.async_engine

    @cached_property
    def width(self) -> int:
        """Samples that each engine runs at once."""
        return self.kind.num_running(self)

    @cached_property
    def num_adapter_sets(self) -> int:
        """Versions of adapters that one engine holds, by `adapter_sets` at either place."""
        return max(self.adapter_sets, self.transformers_cfg.adapter_sets)

    @cached_property
    def takes_external_requests(self) -> bool:
        """Whether `expose_http_server` is on, at either place."""
        return self.expose_http_server or self.vllm_cfg.expose_http_server
