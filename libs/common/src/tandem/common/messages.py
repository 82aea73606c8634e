"""Every message on every link, declared once.

A link is the ZeroMQ connection between the coordinator and one other process. Each direction of each kind of link is
one tagged union at the bottom of this module; receivers dispatch with ``match`` and close with ``assert_never``.
``docs/protocol.md`` is generated from the docstrings here.

A field's type limits its values (`Count`, `Seconds`, ...), and decoding refuses anything else. Further checks lie
elsewhere: replies against their commands in `tandem.coordinator.processes.replies`, commands against the model in the
services, arrays in `tandem.samples.batch`.

Arrays are never part of these structs. A message with arrays says so in its docstring (``Frames:``), and they travel
as raw frames beside the header (`tandem.common.wire`). Layouts and transfer programs are opaque bytes here: the
coordinator relays them, and only `tandem.refit` reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.common.keys import Key, KeyPair

PROTOCOL_VERSION = 27
"""The protocol version, raised whenever a message changes shape; both ends of a link must have the same."""

ServiceKind = Literal["trainer", "rollout", "refit"]
Purpose = Literal["train", "validate"]
LossOfCall = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
DeviceType = Literal["cpu", "cuda"]

MAX_NAME, MAX_TEXT, MAX_TRACEBACK = 200, 10_000, 200_000
"""Most characters of a text; senders truncate longer ones."""
MAX_COMPONENTS = 100
"""Most components of a reward."""
MAX_BRANCHES = 4096
"""Most branches of an agent's episode."""
MAX_VERSIONS = 1000
"""Most weight versions within one sample."""

Count = Annotated[int, Meta(ge=0, le=2**62)]
"""A non-negative integer: a quantity or an index."""
Positive = Annotated[int, Meta(ge=1, le=2**62)]
"""A positive integer."""
Digest = Annotated[int, Meta(ge=0)]
"""A number of 64 bits."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
"""A token id; also below the model's vocabulary size."""
Port = Annotated[int, Meta(ge=1, le=65535)]
"""A TCP port."""
LARGEST = 1e12
"""The largest number that a run computes with (`tandem.common.numeric`)."""
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
"""A finite number that float32 can carry through the arithmetic."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A duration."""
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
"""A fraction of a whole."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""In hexadecimal."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
"""Name of a process, host, file, metric or the like."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""Text for people."""
Notes = Annotated[tuple[Text, ...], Meta(max_length=100)]
"""Notes for the user, a line each."""
Traceback = Annotated[str, Meta(max_length=MAX_TRACEBACK)]
"""A traceback for Tandem's developers."""
Encoded = Annotated[bytes, Meta(min_length=1)]
"""Bytes that only `tandem.refit` decodes."""
Metrics = Annotated[dict[Name, float], Meta(max_length=1000)]
"""Finite numbers by metric name; any other value is refused with its name."""
SecondsByPhase = Annotated[dict[Name, Seconds], Meta(max_length=20)]
"""Seconds by phase name."""
Components = Annotated[dict[Name, Finite], Meta(max_length=MAX_COMPONENTS)]
"""Components of a reward, by name."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every message; the tag on the wire is the class name."""


# --- presence: the same on every link ------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """A request to join the run. The first field never changes, so that any version can read it."""

    protocol_version: int
    service: ServiceKind
    host: Name
    pid: Count
    index: Count | None = None
    """Requested index among the processes of its kind; null for the first that is free."""
    registers: Key | None = None
    """A public key to register; null for a process with a known key. A process started by hand sends it
    under the joining key, and then says hello again under its own."""


class KeyAccepted(Message, frozen=True, kw_only=True, tag=True):
    """Confirmation that the key of a `Hello` is registered."""


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """Admission of a process, with its place in the run."""

    name: Name
    """Name of the process in this run, such as ``trainer-0``; used in every log line and error."""
    index: Count
    """Index among the processes of its kind; for trainers, the rank."""
    run_id: str
    heartbeat_interval_s: Seconds
    heartbeat_timeout_s: Seconds
    orphan_timeout_s: Seconds = 0.0
    """How long the process waits at the same address for another coordinator of the run, once this one was silent
    for ``heartbeat_timeout_s``. Zero: it ends at once. A waiting process says `Hello` over each new connection, and
    a `Welcome` with its own name readmits it: it keeps its memory, and earlier commands are void."""
    config_json: bytes
    """The resolved configuration: `tandem.config.Config` as JSON."""
    store_key: Annotated[bytes, Meta(max_length=64)] = b""
    """The run's key for signatures in ``refit.store``; empty without a store."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """Rejection of a process, which exits with the reason as its error."""

    reason: Text
    is_for_good: bool = False
    """Whether retrying is pointless. The exit code is then 1, otherwise 75."""


class Heartbeat(Message, frozen=True, kw_only=True, tag=True):
    """A sign of life, sent by both ends every ``heartbeat_interval_s``, also during long computations."""

    phase: Text = ""
    """Current phase of the sender, for error messages and the progress display."""
    trainer_keys: Count = 0
    """Number of the newest `TrainerKeys` that it has; zero if none."""


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """Notice that the sender leaves on purpose; it sends nothing more."""

    reason: Text


class Shutdown(Message, frozen=True, kw_only=True, tag=True):
    """Request to clean up and exit, with code 0 at the end of the run."""

    reason: Text
    is_awaited_anew: bool = False
    """Whether the run continues with a replacement; the exit code is then 76."""


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """Reply to a command that could not be carried out."""

    command_id: Count
    phase: Text
    """Phase of the process at the failure."""
    error: Text
    """One line for the user."""
    expected: bool
    """True for a final `TandemError`: the line is enough. False for a reason of the process's own, such as a lack of
    descriptors or disk, or a bug: `traceback` is shown as well, and another process may do better."""
    traceback: Traceback = ""

    @property
    def account(self) -> str:
        """The error, with the traceback if there is one."""
        return f"{self.error}\n{self.traceback}" if self.traceback and not self.expected else self.error


class Command(Message, frozen=True, kw_only=True):
    """The base of every command. A command id seen before is answered again, not carried out again."""

    command_id: Count
    deadline_s: Seconds
    """Seconds that the receiver has, counted from receipt."""


class MemoryUse(Message, frozen=True, kw_only=True):
    """The memory that a process took for a command: bytes allocated on its GPU, or resident bytes on a CPU."""

    peak: Count
    """Most bytes at any time from the command to its reply."""
    held: Count
    """Bytes still held at the reply."""
    reserved: Count = 0
    """Most bytes that torch's allocator had of the GPU, with what is free in its blocks; 0 on a CPU."""


# --- coordinator to trainer and back ---------------------------------------------------------------------------------


class OpenRendezvous(Command, frozen=True, kw_only=True, tag=True):
    """Open the key-value store on rank 0 through which the trainer ranks find each other."""


class RendezvousOpened(Message, frozen=True, kw_only=True, tag=True):
    """Address of the store."""

    command_id: Count
    host: Name
    port: Port


class BuildTrainer(Command, frozen=True, kw_only=True, tag=True):
    """Join the process group, and build the rank's models and the optimizers of those that it trains."""

    rendezvous_host: Name
    rendezvous_port: Port
    world_size: Positive
    """Number of trainers. Those with the same models form a process group; all exchange what their models compute."""
    version: Count
    """Version number of the initial weights: the number of training steps behind them."""
    checkpoint: str = ""
    """Folder of a Tandem checkpoint to resume from; empty to start from ``policy.model_name``."""
    samples_folder: str = ""
    """Folder of the rollout log, beside which log-probabilities are kept; empty where there is none."""
    media_at: Listener | None = msgspec.field(default=None, name="images_at")
    """The coordinator's listener for `FetchImages`; None if the policy does not see."""


class TrainerBuilt(Message, frozen=True, kw_only=True, tag=True):
    """Report that the rank is ready, and that other processes can read the policy's weights."""

    command_id: Count
    version: Count
    """Weight version of the rank: the number of training steps behind it."""
    num_parameters: Positive
    shares_prompts: bool
    """Whether it computes a prompt once for all of its samples, so that they had better stay together."""
    layout: Encoded
    """An encoded `tandem.refit.layout.Layout`: the slices of the policy on this rank, possibly none, and where they
    lie."""


class Listener(Message, frozen=True, kw_only=True):
    """Address where a process listens for others of its run."""

    address: Name
    """``tcp://HOST:PORT``"""
    public_key: Key
    """The server's public key, verified by clients."""


class Train(Command, frozen=True, kw_only=True, tag=True):
    """Run one training step on one batch: every rank gets the same table of it, and fetches the tokens of its shard.

    Frames: the `TABLE` of `tandem.samples.batch`; where `sources` is empty, the `TOKENS` of this rank's sequences
    as well.
    """

    step: Count
    sources: dict[Name, Listener]
    """Listeners that hold the samples, by rollout (`EngineBuilt.samples_at`). The table numbers them in the order of
    their names. Empty for algorithms over data sets, which send their tokens with the command."""


class Trained(Message, frozen=True, kw_only=True, tag=True):
    """Report that the optimizer has stepped: the weights in memory are those of `version` until the next `Train`."""

    command_id: Count
    step: Count
    version: Count
    metrics: Metrics
    """Metrics of the models on this rank, reduced over all ranks that hold them; empty from all but the first of
    these."""
    seconds: SecondsByPhase
    """Seconds by phase: ``policy_training``, ``logprobs``, ``reference_logprobs``; ``values`` and ``value_training``
    of a value model; ``teacher_logprobs`` of a teacher. For a model with processes of its own, the time spent
    waiting for it. Empty from a process that does not hold the policy."""
    compute_s: Seconds
    """The rank's own work within these seconds: the time outside of collective operations."""
    waited_s: Seconds
    """The rest of these seconds: the time spent waiting for other ranks and their data."""
    queued_s: Seconds = 0.0
    """Part of `compute_s` in which the computing thread was ready, but every processor of its machine was busy."""
    has_update: bool
    """Whether an optimizer step had a non-zero gradient and learning rate, so that weights must differ."""
    memory: MemoryUse
    gpus: Metrics = {}
    """Means of the rank's GPU since its last reply, by the names of `tandem.observe.exporters.nvml.GpuUse`."""
    notes: Notes = ()
    """Samples that were set aside, with the reason, and metrics left out because they are not finite."""


class StreamGroups(Command, frozen=True, kw_only=True, tag=True):
    """Add the gradient of some groups of a step, which are there before the others, to that of those before them.

    No weight changes. The `Train` of the step then computes the gradient of the rest alone. Frames: the `TABLE` of
    these groups.
    """

    step: Count
    sources: dict[Name, Listener]
    """Same as in `Train`."""


class GroupsStreamed(Message, frozen=True, kw_only=True, tag=True):
    """Report that the gradient of the groups is there; of no token if a rank could not fetch its samples."""

    command_id: Count
    step: Count
    num_tokens: Count
    """Tokens of these groups, on all ranks, that count in the loss."""


class SamplesMissing(Message, frozen=True, kw_only=True, tag=True):
    """Not every rank could fetch its shard, so no weight has changed; every rank says so.

    The samples fetched so far are kept for the next `Train` of the same step.
    """

    command_id: Count
    step: Count
    rollouts: dict[Name, Text]
    """Rollouts from which this rank lacks samples, possibly none, with the reason."""


class Evaluate(Command, frozen=True, kw_only=True, tag=True):
    """Compute the loss on a batch without training.

    Frames: as for `Train`.
    """

    step: Count
    sources: dict[Name, Listener]
    """Same as in `Train`."""
    parts: dict[str, Count]
    """Number of sequences in each part of the batch that is also evaluated by itself, by name, in order."""


class Evaluated(Message, frozen=True, kw_only=True, tag=True):
    """Metrics of an `Evaluate`; those of a part are named ``PART/METRIC``."""

    command_id: Count
    step: Count
    metrics: Metrics
    notes: Notes = ()
    """Same as in `Trained`."""


class SaveCheckpoint(Command, frozen=True, kw_only=True, tag=True):
    """Copy the current policy and optimizer, and start writing the copy under `folder`.

    The folder has a temporary name until the coordinator renames it.
    """

    folder: str
    step: Count


class CheckpointCopied(Message, frozen=True, kw_only=True, tag=True):
    """Report that this rank has its copy, and that its weights may change."""

    command_id: Count
    why_waited: Text
    """Why the rank wrote everything before it replied, such as a lack of memory for a copy; else empty."""


class AwaitCheckpoint(Command, frozen=True, kw_only=True, tag=True):
    """Reply once the copy of the last `SaveCheckpoint` is written. Other commands are carried out meanwhile."""

    step: Count


class CheckpointSaved(Message, frozen=True, kw_only=True, tag=True):
    """Report that this rank's part is on disk and synced."""

    command_id: Count
    num_bytes: Count


class CopyWeights(Command, frozen=True, kw_only=True, tag=True):
    """Copy the weights, which are those of `version`, to where engines read them (``refit.keep_copy``).

    No engine reads there meanwhile.
    """

    version: Count
    with_digests: bool
    """Whether to compute digests as well: they cannot be computed once the weights have changed."""


class WeightsCopied(Message, frozen=True, kw_only=True, tag=True):
    """Report that engines may read `version` until the next `CopyWeights`, and that the weights may change."""

    command_id: Count
    version: Count
    digests: tuple[bytes, ...]
    """Digests of the weights rather than of the copy, since engines read the copy and should hold what was trained.
    As in `DigestsReported`; empty unless requested."""


# --- training by single calls, for a front end: coordinator to trainer and back --------------------------------------


class AddGradient(Command, frozen=True, kw_only=True, tag=True):
    """Score sequences that a front end gives, and add the gradient of their loss to that of the calls before.

    The loss is a sum over tokens. Frames: ``lengths_S``, ``rank_S``, ``prompt_S`` and ``prompt_lengths_S`` (int32) of
    all sequences, where a prompt is what sequences begin with together; of this rank's, ``token_ids_T`` (int32),
    ``loss_mask_T`` (bool), and ``weights_T``, ``advantages_T`` and ``logprobs_T`` (float32). Where other tokens are
    scored in the place of these, ``targets_T`` (int32) as well.
    """

    loss: LossOfCall
    settings: Annotated[dict[Name, Finite], Meta(max_length=10)]
    """Arguments of the loss, by the names of `tandem.trainer.calls.calls`."""
    has_gradient: bool
    """Whether to compute the gradient, rather than only the scores."""


class GradientAdded(Message, frozen=True, kw_only=True, tag=True):
    """Scores of an `AddGradient`."""

    command_id: Count
    loss: Finite
    """Loss of all sequences on all ranks."""
    logprobs: bytes
    """Log-probability of each token of this rank's sequences, in little-endian float32; zero outside the loss mask."""


class StepOptimizer(Command, frozen=True, kw_only=True, tag=True):
    """Take one step of AdamW with the gradient of the calls before, and forget it."""

    learning_rate: Annotated[float, Meta(ge=0.0, le=LARGEST)]
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)]
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)]
    eps: Annotated[float, Meta(ge=0.0, le=LARGEST)]
    weight_decay: Annotated[float, Meta(ge=0.0, le=LARGEST)]
    max_grad_norm: Annotated[float, Meta(ge=0.0, le=LARGEST)]
    """Norm that larger gradients are scaled down to; zero for none."""


class OptimizerStepped(Message, frozen=True, kw_only=True, tag=True):
    """Report that the optimizer has stepped."""

    command_id: Count
    grad_norm: Finite
    """Norm of the gradient before it was scaled down."""


class RestoreTraining(Command, frozen=True, kw_only=True, tag=True):
    """Give the policy the weights of a checkpoint, and forget any gradient."""

    folder: str
    """Folder of the checkpoint; empty for the weights that the run began with."""
    with_optimizer: bool
    """Whether to restore the optimizer's state as well, rather than to begin without one."""


class SwitchTraining(Command, frozen=True, kw_only=True, tag=True):
    """Keep the policy's weights, optimizer and gradient, and train another set: one that is new is as the run began."""

    number: Count


class KeepWeights(Command, frozen=True, kw_only=True, tag=True):
    """Keep a copy of the policy's weights as a set that no training changes, in the place of one of its number."""

    number: Count


class TrainingRestored(Message, frozen=True, kw_only=True, tag=True):
    """Report that this rank holds the weights."""

    command_id: Count


# --- coordinator to rollout and back ---------------------------------------------------------------------------------


class RewardServer(Message, frozen=True, kw_only=True):
    """Server of the program that started the run, which scores responses with its own functions."""

    port: Port
    """Port on the coordinator's host."""
    public_key: Key
    """The server's public key, verified by rollouts."""
    callers: KeyPair
    """Key pair, made for this server, with which rollouts authenticate."""


class BuildEngine(Command, frozen=True, kw_only=True, tag=True):
    """Build the generation engine, without weights, and the environments.

    An existing engine stays. It cancels all earlier commands, forgets its samples, and replies once none of that is
    still being written: all trainers were restarted.
    """

    samples_folder: str = ""
    """Folder of the rollout log, to which finished samples are written; empty where there is none."""
    reward_server: RewardServer | None = None
    """Server that scores responses; None where the configuration alone describes the environment."""
    media_at: Listener | None = msgspec.field(default=None, name="images_at")
    """The coordinator's listener for `FetchImages`; None if the policy does not see."""


class EngineServer(Message, frozen=True, kw_only=True):
    """The OpenAI endpoint of a rollout, for external requests."""

    url: Name
    """``http://HOST:PORT``."""
    token: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Token that clients must send; empty on loopback, where none is needed."""


class EngineBuilt(Message, frozen=True, kw_only=True, tag=True):
    """Report that the engine is built and needs weights."""

    command_id: Count
    layouts: Annotated[tuple[Encoded, ...], Meta(min_length=1)]
    """Encoded `tandem.refit.layout.Layout`s: what each of its `tandem.common.worker_shards` needs, and where."""
    samples_at: Listener
    """Listener from which trainers fetch its samples."""
    external_requests: EngineServer | None = None
    """Endpoint for external requests; None where `policy.generation.expose_http_server` is off."""


class ImageRef(Message, frozen=True, kw_only=True):
    """An image of a prompt: which one it is, and how many tokens it takes. Its bytes lie in a store of images."""

    digest: Sha256
    """SHA-256 of the encoded bytes."""
    width: Positive
    """Pixels across, as it is shown: after the turn that its EXIF data asks for."""
    height: Positive
    grid: Annotated[tuple[Count, ...], Meta(max_length=3)] = ()
    """How the policy's family divides it: patches as (1, rows, columns) for Qwen, (rows, columns) of crops for
    SmolVLM and Idefics3, nothing for Gemma 3."""
    num_tokens: Positive
    """Placeholder tokens whose embeddings the image's features replace."""


Media = tuple[ImageRef, ...]
"""All that a prompt has besides tokens, in order: its images."""


Question = str | list[dict[str, Any]]
"""A text, or the messages of a conversation, with all the fields that they came with."""


class Problem(Message, frozen=True, kw_only=True):
    """A problem as an environment sees it."""

    problem_id: str
    """Stable id, unique within the dataset; train and validation never share one."""
    question: Question
    answer: Any
    """Reference answer, as the JSON value that stood in the row: a list where any of several is right, None where
    the environment needs none."""
    metadata: dict[str, Any]
    """Further data for scoring, as plain JSON values."""
    prompt: tuple[dict[str, Any], ...] = ()
    """The messages that the first response answers, if the environment is a reward model; else empty."""


class PromptGroup(Message, frozen=True, kw_only=True):
    """A problem, its tokens, and the seeds of the samples to generate for it."""

    group: Count
    """Position of the group within the step's batch."""
    problem: Problem
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    seeds: Annotated[tuple[Digest, ...], Meta(min_length=1)]
    """A 64-bit seed for each sample: the same seed, weights and prompt give the same sample, whatever else runs."""
    environment: str = ""
    """Entry of ``env`` that scores the samples; empty if the run has only one."""
    media: tuple[ImageRef, ...] | None = msgspec.field(default=None, name="images")
    """Images of the prompt, in order; None if the model does not see."""
    tools_field: str = ""
    """Field of the problem's metadata with the tools that the prompt shows; empty if it shows none."""


class SamplingParameters(Message, frozen=True, kw_only=True):
    """Parameters of the sampling distribution."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e6)]
    """Zero means greedy."""
    top_p: Share
    top_k: Count
    """Zero means no limit."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Least share of the likeliest token's probability; it goes before top-k and top-p."""
    max_new_tokens: Positive
    stop_token_ids: tuple[TokenId, ...]
    stop_strings: tuple[str, ...]
    bad_token_ids: tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1)], ...] = ()
    """Sequences of tokens that a response may not contain. Tokens are drawn from what remains."""


class Generate(Command, frozen=True, kw_only=True, tag=True):
    """Generate and score samples for these groups; what is known of each sample is sent as it finishes.

    Samples to train on stay with the rollout until they are released; samples for validation are not kept.
    """

    cancel_before: Count
    """Lowest command id that stays valid. Earlier `Generate` commands are cancelled and the samples of their
    unfinished groups released; later ones go on beside this one."""
    step: Count
    purpose: Purpose
    sampling: SamplingParameters
    groups: tuple[PromptGroup, ...]


class Branch(Message, frozen=True, kw_only=True):
    """One sequence of an agent's episode: a path through its tree of requests, from the first to a leaf.

    Tokens that several branches begin with count in the first of them.
    """

    prompt_length: Positive
    """Tokens before the first that counts here."""
    num_made: Positive
    """Tokens that count here."""
    num_tokens: Positive
    """Tokens of the whole sequence."""


class SampleScored(Message, frozen=True, kw_only=True):
    """Everything known of a finished sample except its tokens, which stay with the rollout."""

    group: Count
    sample: Count
    """Position within its group."""
    prompt_length: Positive
    response_length: Count
    """Tokens generated by the policy, in all turns; zero only if an agent failed before its first request, or if an
    image of the prompt could not be read."""
    num_tokens: Positive
    """Tokens of the whole sequence: prompt, generated tokens, and the environment's replies. For an agent's episode,
    the tokens of all branches."""
    branches: Annotated[tuple[Branch, ...], Meta(max_length=MAX_BRANCHES)] = ()
    """Sequences of an agent's episode; empty for a sample of one sequence, which begins with its group's prompt."""
    roles: Annotated[tuple[Count, ...], Meta(max_length=MAX_BRANCHES)] = ()
    """Role that the policy plays in each of them, as its place in ``env.NAME.roles``; empty where that has none."""
    role_rewards: tuple[Finite, ...] = ()
    """Reward of each role; empty where there are none."""
    oldest_version: Count
    newest_version: Count
    """Oldest and newest weight version of the generated tokens."""
    tokens_by_version: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_VERSIONS)]
    """Tokens generated by each of these versions, from the oldest to the newest."""
    num_turns: Count
    """Responses of the policy: one, unless the environment replies or an agent asks again."""
    finish_reason: Literal["stop", "length", "turns"]
    """How the sample ended: at a stop token, at a token limit, or at ``grpo.max_rollout_turns``."""
    reward: Finite
    components: Components = {}
    """Components of the reward according to the environment, by name."""
    spent: Components = {}
    """Cost of scoring it, by name."""
    correct: bool
    extracted_answer: str | None = None
    """Answer that the environment extracted; None if it found none, looks for none, or the sample is to train on."""
    response: str
    """The messages after the prompt, a line each, for logs; empty unless the sample is for validation."""
    failure: Text = ""
    """Why the environment could not score the last response, on one line; empty if it did, or if a limit came first."""
    timed_out: bool = False
    """Whether the failure is a timeout."""
    dropped: bool = False
    """Whether the failed sample is excluded everywhere (``env.NAME.on_error: drop``); else it has its turns'
    rewards."""


class SamplesFinished(Message, frozen=True, kw_only=True, tag=True):
    """Finished samples of a `Generate`, each sent exactly once; the rollout keeps the tokens of those to train on."""

    command_id: Count
    step: Count
    purpose: Purpose
    samples: Annotated[tuple[SampleScored, ...], Meta(min_length=1)]


class Generated(Message, frozen=True, kw_only=True, tag=True):
    """Report that every sample of a `Generate` was sent."""

    command_id: Count
    step: Count
    purpose: Purpose
    num_samples: Count
    num_tokens: Count
    """Tokens generated by the engine."""
    seconds: SecondsByPhase
    """Seconds by phase: ``generation``, ``rewards``."""
    memory: MemoryUse
    gpus: Metrics = {}
    """Means of the engine's GPUs since its last reply, by the names of `tandem.observe.exporters.nvml.GpuUse`."""
    drafts: tuple[Count, Count] | None = None
    """Tokens that were drafted since its last reply, and those of them that were accepted; None without drafts."""


class ReleaseSamples(Command, frozen=True, kw_only=True, tag=True):
    """Release samples that are no longer needed; this command is not answered."""

    command_ids: tuple[Count, ...]
    """Ids of the `Generate` commands, to release their samples."""


class RecordedGroup(Message, frozen=True, kw_only=True):
    """A group of a training or validation step, as the rollout log has it."""

    command_id: Count
    """Id of the command that its samples were generated for."""
    group: Count
    advantages: tuple[Finite | None, ...]
    """Advantages of its samples, in order; null for a sample that was not trained on."""


class RecordSamples(Command, frozen=True, kw_only=True, tag=True):
    """Write to the rollout log the samples of one rollout that a finished step has used.

    The step has trained or was validated; the samples are on disk since they finished. Other samples that the
    rollout wrote for the step are left out. A repeated command is carried out again.
    """

    step: Count
    rollout: Name
    """Rollout that generated the samples: the receiver, unless that rollout is lost."""
    purpose: Purpose = "train"
    groups: Annotated[tuple[RecordedGroup, ...], Meta(min_length=1)]


class SamplesRecorded(Message, frozen=True, kw_only=True, tag=True):
    """Report that the samples are in the rollout log."""

    command_id: Count
    step: Count
    num_samples: Count
    num_bytes: Count
    """Size of the Parquet shard."""
    num_missing: Count
    """Samples that were never written, for example because the disk was full."""


class RestoreSamples(Command, frozen=True, kw_only=True, tag=True):
    """Restore groups from disk that were generated before the run was resumed; the replies are those to a
    `Generate`."""

    step: Count
    files: Annotated[dict[Text, tuple[tuple[Count, Count], ...]], Meta(min_length=1)]
    """Groups to restore, by the file's path within the folder of the rollout log: the command id that a group was
    generated for, and its number."""
    num_samples: Positive
    """Samples in each group."""


class TrainerKeys(Message, frozen=True, kw_only=True, tag=True):
    """Keys of the trainers that may fetch samples. Sent to rollouts before any command that follows a change, and
    again if it was lost."""

    number: Positive
    """Sequence number, raised by one with each change."""
    public_keys: tuple[Key, ...]
    """Keys of all trainers."""


class Leaving(Message, frozen=True, kw_only=True, tag=True):
    """Notice that the rollout is draining: it finishes its commands and waits for the final `Shutdown`. Repeated
    until then in case it is lost."""


# --- the sample plane: trainer to rollout and back --------------------------------------------------------------------

SampleKey = tuple[Count, Count, Count]
"""A sample of a rollout: command id of its `Generate`, its group, its index in the group."""

SequenceKey = tuple[Count, Count, Count, Count]
"""A sequence of a sample: its `SampleKey`, and the index among its branches; 0 where it has none."""


MAX_TOKENS_FETCHED = 2**21
"""Most tokens per request, unless it asks for a single sample; the arrays of a reply are then about 27 MB at most."""


class FetchSamples(Message, frozen=True, kw_only=True, tag=True):
    """Request of a trainer rank for sequences of samples."""

    run_id: Name
    """Run of the trainer, in case the address belongs to another run by now."""
    request_id: Count
    keys: tuple[SequenceKey, ...]


class SamplesFetched(Message, frozen=True, kw_only=True, tag=True):
    """The requested samples.

    Frames: the `SAMPLES` of `tandem.samples.batch`, in the order of the keys.
    """

    request_id: Count


class SamplesGone(Message, frozen=True, kw_only=True, tag=True):
    """Report that the rollout lacks some of these samples, or that the requester may not have them."""

    request_id: Count
    why: Text


MAX_IMAGES_FETCHED = 1024
"""Most images per request."""
MAX_IMAGE_BYTES_FETCHED = 2**26
"""Most bytes of a reply's images, unless it has a single one."""


class FetchImages(Message, frozen=True, kw_only=True, tag=True):
    """Request for encoded images that the requester's copy of the run's folder lacks: to a rollout that has samples
    with them, or to the coordinator."""

    run_id: Name
    """Run of the requester, in case the address belongs to another run by now."""
    request_id: Count
    digests: Annotated[tuple[Sha256, ...], Meta(min_length=1, max_length=MAX_IMAGES_FETCHED)]


FetchMedia = FetchImages


class ImagesFetched(Message, frozen=True, kw_only=True, tag=True):
    """The first of the requested images, as many as fit, and those before them that are not there.

    Frames: ``bytes_B`` (uint8), the images of `digests`, end to end.
    """

    request_id: Count
    digests: Annotated[tuple[Sha256, ...], Meta(max_length=MAX_IMAGES_FETCHED)]
    sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_IMAGES_FETCHED)]
    """Bytes of each image."""
    gone: Annotated[tuple[Sha256, ...], Meta(max_length=MAX_IMAGES_FETCHED)]
    """Requested images that the sender lacks, or that were damaged since."""


# --- rollout to the program that began the run, and back --------------------------------------------------------------


class ResponseToScore(Message, frozen=True, kw_only=True):
    """A response for the program's functions to score."""

    number: Count
    """Number of the call; the score carries it too."""
    problem: Problem
    response: str
    """The answer: the text after all reasoning, in the last channel."""
    text: str | None = None
    """The whole response, with reasoning, calls and their markers; None if it is the answer."""


class ScoreResponses(Message, frozen=True, kw_only=True, tag=True):
    """Request of a rollout for the scores of some responses. A repeated response is scored again."""

    responses: tuple[ResponseToScore, ...]


class ScoredResponse(Message, frozen=True, kw_only=True):
    """Result of the program's functions for one response: a score or a failure."""

    number: Count
    reward: Finite = 0.0
    correct: bool = False
    components: Components = {}
    failure: Text = ""
    """Reason of the failure, on one line; empty where there is a score."""
    traceback: Traceback = ""
    timed_out: bool = False


class ResponsesScored(Message, frozen=True, kw_only=True, tag=True):
    """Scores of some of the requested responses, in any order, sent as soon as they exist."""

    scored: tuple[ScoredResponse, ...]


class StillScoring(Message, frozen=True, kw_only=True, tag=True):
    """Notice, sent every second while a rollout waits for scores, that the program is alive and scoring."""


# --- the weight plane: coordinator to trainer and rollout, and back ---------------------------------------------------


class InstallProgram(Command, frozen=True, kw_only=True, tag=True):
    """Open the memory that a transfer program reads, and bind the program to the process's own tensors.

    Both engines and trainer ranks get one.
    """

    programs: Annotated[tuple[Encoded, ...], Meta(min_length=1)]
    """An encoded `tandem.refit.program.TransferProgram` for each worker shard of the process, in order."""


class ProgramInstalled(Message, frozen=True, kw_only=True, tag=True):
    """Report that the program is bound; a `Refit` from now on only copies."""

    command_id: Count
    num_copies: Count
    num_bytes: Count
    """Bytes that one refit moves into this process; zero where every tensor is zero-copy."""


class ConnectTransferGroup(Command, frozen=True, kw_only=True, tag=True):
    """Connect to the other processes of a transfer group, which stream to each other; each of them gets this
    command.

    Repeated with a new `epoch` when one of them is replaced.
    """

    transfer_group: Name
    members: tuple[str, ...]
    device_type: DeviceType = "cpu"
    """Device of its messages, as planned by refit."""
    epoch: Count
    """Number of times that the transfer group was connected before."""
    rendezvous_host: Name
    rendezvous_port: Port
    public_keys: dict[str, Key] = {}
    """Public keys of its processes, by name: their proof for each other if they connect over TCP."""


class TransferGroupConnected(Message, frozen=True, kw_only=True, tag=True):
    """Report that the process has reached every other process of the transfer group."""

    command_id: Count
    transfer_group: Name


class Refit(Command, frozen=True, kw_only=True, tag=True):
    """Run the transfer program. An engine receives `version` and serves no token until it has replied; others send."""

    version: Count
    only: tuple[str, ...] = ()
    """Engines to bring to `version`; empty for all."""
    joining_engines: tuple[str, ...] = ()
    """Joining engines among them, which also get the tensors that never change, if trainers hold any."""
    whole: tuple[str, ...] = ()
    """Engines among them that hold no verified version; senders of differences send them whole weights."""


class Refitted(Message, frozen=True, kw_only=True, tag=True):
    """Report that the engine holds all of `version`, or that a sender has sent all of it."""

    command_id: Count
    version: Count
    num_bytes: dict[Name, Count]
    """Bytes counted at this end of each link, named ``trainer-0>rollout-1``."""
    seconds: Seconds
    memory: MemoryUse


class ReportDigests(Command, frozen=True, kw_only=True, tag=True):
    """Compute the digests of `version` from memory, in the background; other commands are not delayed."""

    version: Count


class DigestsReported(Message, frozen=True, kw_only=True, tag=True):
    """Digests of `version` in the memory of a process; see `tandem.refit.digests.task`."""

    command_id: Count
    version: Count
    digests: Annotated[tuple[bytes, ...], Meta(min_length=1)]
    """For each worker shard, its part of the digest of each tensor of its layout, in order: unsigned 64-bit
    little-endian integers."""
    seconds: Seconds
    """Time spent computing."""


# --- coordinator to refit and back -----------------------------------------------------------------------------------


class PlanTransfers(Command, frozen=True, kw_only=True, tag=True):
    """Plan how every wanted element reaches its engine."""

    sources: dict[Name, Encoded]
    """Encoded layouts of the trainer ranks, by process."""
    destinations: dict[Name, Encoded]
    """Encoded layouts of the engines, by worker shard."""
    allow_alias: bool
    """True if no engine generates while the trainer steps on the same devices; engines may then read the trainer's
    memory in place (zero-copy)."""
    alias_frozen: bool = False
    """Whether engines may read tensors that never change in place."""


class PlannedTransferGroup(Message, frozen=True, kw_only=True):
    """A transfer group: processes that stream to each other."""

    name: Name
    members: tuple[Name, ...]
    device_type: DeviceType = "cpu"
    """Device of its messages: GPUs, connected by NCCL, if the memory of every process is there."""


class TransfersPlanned(Message, frozen=True, kw_only=True, tag=True):
    """Transfer programs for all processes, proven to write each wanted element exactly once."""

    command_id: Count
    programs: dict[Name, Encoded]
    """Encoded `tandem.refit.program.TransferProgram` by worker shard."""
    senders: tuple[str, ...]
    """Processes that take part in a refit beside the engines that receive."""
    transfer_groups: tuple[PlannedTransferGroup, ...]
    num_bytes: dict[Name, Count]
    """Bytes that one refit moves over each link between worker shards, named ``trainer-0>rollout-1``."""
    predicted_s: Annotated[float, Meta(ge=0.0, le=1e300)]
    """Predicted seconds of a refit at the rates of ``cluster.links``."""
    bound_s: Annotated[float, Meta(ge=0.0, le=1e300)]
    """Lower bound on the seconds of any plan at these rates: see `tandem.refit.cost`."""
    seconds: Seconds
    """Time spent planning."""
    num_bytes_frozen: dict[Name, Count] = {}
    """Bytes of tensors that never change, over each link; sent in addition to an engine that has none of them yet."""


class CommitVersion(Command, frozen=True, kw_only=True, tag=True):
    """Compare the weights on engines with those that trainers meant to send, and make `version` the current one."""

    version: Count
    digests: dict[str, bytes]
    """Digests by worker shard, as `DigestsReported` has them, of trainers and engines; empty if nothing is verified."""
    has_update: bool
    """Whether the weights must differ from those of the previous version."""


class VersionCommitted(Message, frozen=True, kw_only=True, tag=True):
    """Report that samples of `version` may be trained on, except those of engines that differ."""

    command_id: Count
    version: Count
    differing: dict[Name, Text]
    """Engines that do not hold `version`, with the tensors that differ; they must be refitted."""
    digest: Digest
    """Digest of all of `version`; zero where ``refit.verify`` is off."""


Presence = Hello | Heartbeat | Goodbye | Failed
"""Messages that any process may send to the coordinator."""

Admission = KeyAccepted | Welcome | Refused | Heartbeat | Shutdown
"""Messages that the coordinator may send to any process."""

PlaneCommand = InstallProgram | ConnectTransferGroup | Refit | ReportDigests
"""Commands of the weight plane, for trainers and engines alike."""
PlaneReply = ProgramInstalled | TransferGroupConnected | Refitted | DigestsReported

CallCommand = AddGradient | StepOptimizer | RestoreTraining | SwitchTraining | KeepWeights
CallReply = GradientAdded | OptimizerStepped | TrainingRestored

TrainerCommand = (
    OpenRendezvous
    | BuildTrainer
    | PlaneCommand
    | Train
    | StreamGroups
    | Evaluate
    | SaveCheckpoint
    | AwaitCheckpoint
    | CopyWeights
    | CallCommand
)
RolloutCommand = BuildEngine | PlaneCommand | Generate | RestoreSamples | RecordSamples | ReleaseSamples
RefitCommand = PlanTransfers | CommitVersion
AnyCommand = TrainerCommand | RolloutCommand | RefitCommand

TrainerReply = (
    RendezvousOpened
    | TrainerBuilt
    | PlaneReply
    | Trained
    | GroupsStreamed
    | SamplesMissing
    | Evaluated
    | CheckpointCopied
    | CheckpointSaved
    | WeightsCopied
    | CallReply
)
RolloutReply = EngineBuilt | PlaneReply | SamplesFinished | Generated | SamplesRecorded
RefitReply = TransfersPlanned | VersionCommitted
Reply = TrainerReply | RolloutReply | RefitReply

ToTrainer = Admission | TrainerCommand
FromTrainer = Presence | TrainerReply

ToRollout = Admission | TrainerKeys | RolloutCommand
FromRollout = Presence | Leaving | RolloutReply

ToRefit = Admission | RefitCommand
FromRefit = Presence | RefitReply

ToSampleStore = FetchSamples | FetchImages
FromSampleStore = SamplesFetched | SamplesGone | ImagesFetched
"""The coordinator answers `FetchImages` of any process likewise."""

ToRewardServer = ScoreResponses
FromRewardServer = ResponsesScored | StillScoring
