"""Every message on every link, declared once.

A link is the ZeroMQ connection between the coordinator and one other process. Each direction of each kind of link is
one tagged union at the bottom of this module; receivers dispatch with ``match`` and close with ``assert_never``.
``docs/protocol.md`` is generated from the docstrings here.

The type of a field says what it may be by itself (`Count`, `Seconds`, ...), and decoding refuses anything else. What a
reply may be as the answer to a certain order is checked in `tandem.coordinator.members.replies`, what an order may be
for a certain model by the services, and arrays in `tandem.samples.batch`.

Arrays never enter these structs. A message that carries arrays says so in its docstring (``Frames:``) and they travel
as raw frames beside the header (`tandem.common.wire`). Layouts and transfer programs are opaque bytes here: only
`tandem.refit` reads them, the coordinator relays them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.common.keys import Key, KeyPair

PROTOCOL_VERSION = 14
"""Raised whenever a message changes shape; both ends of a link must hold the same number."""

ServiceKind = Literal["trainer", "rollout", "refit"]
Purpose = Literal["train", "validate"]
DeviceType = Literal["cpu", "cuda"]

MAX_NAME, MAX_TEXT, MAX_TRACEBACK = 200, 10_000, 200_000
"""Characters; senders cut longer texts off."""
MAX_COMPONENTS = 100
"""Of a reward."""
MAX_BRANCHES = 4096
"""Of an agent's episode."""
MAX_VERSIONS = 1000
"""Weight versions that the tokens of one sample are made with."""

Count = Annotated[int, Meta(ge=0, le=2**62)]
"""A number of something, or the number of something."""
Positive = Annotated[int, Meta(ge=1, le=2**62)]
"""A number of something that there must be."""
Digest = Annotated[int, Meta(ge=0)]
"""64 bits."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
"""Below the vocabulary of the model as well."""
Port = Annotated[int, Meta(ge=1, le=65535)]
"""Of TCP."""
LARGEST = 1e12
"""The largest number that a run computes with (`tandem.common.bounds`)."""
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
"""No NaN, no infinity, and nothing that float32 cannot carry through the arithmetic."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A time something took or may take."""
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
"""A part of a whole."""
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
"""Of a process, host, file, metric or the like."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""For people."""
Notes = Annotated[tuple[Text, ...], Meta(max_length=100)]
"""What a user should know, a line each."""
Traceback = Annotated[str, Meta(max_length=MAX_TRACEBACK)]
"""For people who mend Tandem."""
Encoded = Annotated[bytes, Meta(min_length=1)]
"""Something that only `tandem.refit` reads."""
Metrics = Annotated[dict[Name, float], Meta(max_length=1000)]
"""Finite numbers; a metric that is none is refused by its own name."""
SecondsByPhase = Annotated[dict[Name, Seconds], Meta(max_length=20)]
"""Not more phases than there are."""
Components = Annotated[dict[Name, Finite], Meta(max_length=MAX_COMPONENTS)]
"""What a reward is made of."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message; the tag on the wire is the class name."""


# --- membership: the same on every link ------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """A process asks to join. The first field never changes, so that any version can read it."""

    protocol_version: int
    service: ServiceKind
    host: Name
    pid: Count
    index: Count | None = None
    """The place that it asks for among the processes of its kind; null for the first that is free."""
    enrols: Key | None = None
    """A public key to be admitted, by which the process then says hello again: said by one that was started by hand,
    whose own key nobody knows, and that has proven the run's joining key. Null otherwise."""


class Enrolled(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator admits the key that a `Hello` enrols."""


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator admits a process and gives it its place in the run."""

    member: Name
    """Its name in this run, such as ``trainer-0``; used in every log line and error."""
    index: Count
    """Its place among the processes of its kind; for trainers this is the rank."""
    run_id: str
    heartbeat_interval_s: Seconds
    heartbeat_timeout_s: Seconds
    orphan_timeout_s: Seconds = 0.0
    """How long the process waits for another coordinator of the run, at the same address, after this one was silent for
    ``heartbeat_timeout_s``. Zero: it ends then. One that waits says `Hello` over each new connection, and a `Welcome`
    with its own name tells it that it is taken up: it keeps its memory, and what it was asked for before is over."""
    config_json: bytes
    """The resolved configuration: `tandem.config.Config` as JSON."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """The coordinator does not admit the process; it exits with the reason as its error."""

    reason: Text
    is_for_good: bool = False
    """Whether it is no use to ask again; the exit code is 1 then, and 75 otherwise."""


class Heartbeat(Message, frozen=True, kw_only=True, tag=True):
    """Sent by both ends every ``heartbeat_interval_s``, also during long computations."""

    phase: Text = ""
    """What the sender is doing, for error messages and the progress display."""
    trainer_keys: Count = 0
    """The number of the newest `TrainerKeys` that it has; zero if none."""


class Goodbye(Message, frozen=True, kw_only=True, tag=True):
    """The sender leaves on purpose; nothing more will come from it."""

    reason: Text


class Shutdown(Message, frozen=True, kw_only=True, tag=True):
    """The process is to go: it cleans up and exits, with code 0 when the run ends."""

    reason: Text
    is_awaited_anew: bool = False
    """Whether the run goes on with another process in its place; then the code is 76."""


class Failed(Message, frozen=True, kw_only=True, tag=True):
    """A command could not be carried out."""

    command_id: Count
    phase: Text
    """What the process was doing."""
    error: Text
    """One line for the user."""
    expected: bool
    """True for a final `TandemError`: the line is enough. False for a reason of the process's own, such as a lack of
    descriptors or a bug: `traceback` is shown as well, and another process may do better."""
    traceback: Traceback = ""

    @property
    def account(self) -> str:
        """All there is to tell."""
        return self.error if self.expected else f"{self.error}\n{self.traceback}"


class Command(Message, frozen=True, kw_only=True):
    """Base of every order. A command id that was seen before is answered again, not carried out again."""

    command_id: Count
    deadline_s: Seconds
    """Seconds the receiver has, from receipt."""


class MemoryUse(Message, frozen=True, kw_only=True):
    """Bytes that a process took to carry out an order: allocated on its GPU, or resident where it computes on a CPU."""

    peak: Count
    """The most at any time from the order to its answer."""
    held: Count
    """What it still has at the answer."""


# --- coordinator to trainer and back ---------------------------------------------------------------------------------


class OpenRendezvous(Command, frozen=True, kw_only=True, tag=True):
    """Rank 0 opens the key-value store through which the trainer ranks find each other."""


class RendezvousOpened(Message, frozen=True, kw_only=True, tag=True):
    """Where the ranks meet."""

    command_id: Count
    host: Name
    port: Port


class BuildTrainer(Command, frozen=True, kw_only=True, tag=True):
    """Every rank joins its process group and builds the models that it holds, and the optimizers of those it trains."""

    rendezvous_host: Name
    rendezvous_port: Port
    world_size: Positive
    """Trainers of the run. Those that hold the same models are a process group; all exchange what their models say."""
    version: Count
    """Weight version that the weights to start from count as: the number of training steps behind them."""
    checkpoint: str = ""
    """Folder of a Tandem checkpoint to resume from; empty to start from ``policy.model_name``."""
    samples_folder: str = ""
    """Folder of the record of samples, beside which log-probabilities are kept; empty where there is none."""


class TrainerBuilt(Message, frozen=True, kw_only=True, tag=True):
    """The rank is ready and the policy's weights lie where other processes can read them."""

    command_id: Count
    version: Count
    """Weight version the rank now holds: the number of training steps behind it."""
    num_parameters: Positive
    shares_prompts: bool
    """Whether it computes a prompt once for all of its samples, so that these had better stay together."""
    layout: Encoded
    """An encoded `tandem.refit.layout.Layout`: what this rank holds of the policy, and where; it may be nothing."""


class Listener(Message, frozen=True, kw_only=True):
    """Where a process listens for others of its run."""

    address: Name
    """``tcp://HOST:PORT``"""
    public_key: Key
    """Which it proves to whoever connects."""


class Train(Command, frozen=True, kw_only=True, tag=True):
    """Run one training step on one batch: every rank gets the same table of it, and fetches the tokens of its shard.

    Frames: the `TABLE` of `tandem.samples.batch`; where `sources` is empty, the `TOKENS` of this rank's sequences
    as well.
    """

    step: Count
    sources: dict[Name, Listener]
    """Where the samples lie: rollouts and their `EngineBuilt.samples_at`. The table counts them in the order of their
    names. Empty for algorithms over data sets, whose tokens come with the order."""


class Trained(Message, frozen=True, kw_only=True, tag=True):
    """The optimizer has stepped; the weights in memory are those of `version` and stay so until the next `Train`."""

    command_id: Count
    step: Count
    version: Count
    metrics: Metrics
    """Metrics of the models that it holds, already reduced over all ranks that do; empty from all but the first of
    these."""
    seconds: SecondsByPhase
    """Seconds by phase: ``policy_training``, ``logprobs``, ``reference_logprobs``, and of a value model ``values`` and
    ``value_training``, of a teacher ``teacher_logprobs``. Of a model with processes of its own they are those of
    waiting for it. Empty from a process that does not hold the policy."""
    compute_s: Seconds
    """Of these, the rank's own work: what it spent outside of collective operations."""
    waited_s: Seconds
    """The rest: it waited for the other ranks, or for what they send."""
    has_update: bool
    """Whether an optimizer step had a gradient and a learning rate that are not zero, so that weights must differ."""
    memory: MemoryUse
    gpus: Metrics = {}
    """The rank's GPU since its last answer: means by the names of `tandem.observe.exporters.nvml.GpuUse`."""
    notes: Notes = ()
    """Which samples were set aside, and why; which metrics are missing because they are no finite numbers."""


class SamplesMissing(Message, frozen=True, kw_only=True, tag=True):
    """Not every rank could fetch its shard, so no weight has changed; every rank says so.

    What was fetched is kept for the next `Train` of the same step.
    """

    command_id: Count
    step: Count
    members: dict[Name, Text]
    """The rollouts whose samples this rank itself lacks, possibly none, and why."""


class Evaluate(Command, frozen=True, kw_only=True, tag=True):
    """Compute the loss on a batch without training.

    Frames: as for `Train`.
    """

    step: Count
    sources: dict[Name, Listener]
    """As in `Train`."""
    parts: dict[str, Count]
    """Sequences of each part of the batch that is evaluated by itself as well, by its name, in order."""


class Evaluated(Message, frozen=True, kw_only=True, tag=True):
    """The metrics of an `Evaluate`; those of a part are named ``PART/METRIC``."""

    command_id: Count
    step: Count
    metrics: Metrics
    notes: Notes = ()
    """As in `Trained`."""


class SaveCheckpoint(Command, frozen=True, kw_only=True, tag=True):
    """Copy policy and optimizer as they are now, and begin to write the copy under `folder`.

    The folder has a temporary name until the coordinator renames it.
    """

    folder: str
    step: Count


class CheckpointCopied(Message, frozen=True, kw_only=True, tag=True):
    """This rank has its copy, and its weights may change."""

    command_id: Count
    why_waited: Text
    """Why it has written everything before it answered, as it does where memory has no room for a copy; else empty."""


class AwaitCheckpoint(Command, frozen=True, kw_only=True, tag=True):
    """Say when what the last `SaveCheckpoint` has copied is written. Other orders are carried out in the meantime."""

    step: Count


class CheckpointSaved(Message, frozen=True, kw_only=True, tag=True):
    """This rank's part is on disk and synced."""

    command_id: Count
    num_bytes: Count


class CopyWeights(Command, frozen=True, kw_only=True, tag=True):
    """Copy the weights, which are those of `version`, to where engines read them from (``refit.keep_copy``).

    No engine reads there meanwhile.
    """

    version: Count
    with_digests: bool
    """Whether to compute digests as well: once weights change there is nothing more to compute them from."""


class WeightsCopied(Message, frozen=True, kw_only=True, tag=True):
    """Engines may read `version` until the next `CopyWeights`, and the weights themselves may change."""

    command_id: Count
    version: Count
    digests: tuple[bytes, ...]
    """Of the weights, not of their copy: engines, which read the copy, are to hold what was trained. As in `Attested`;
    empty unless asked for."""


# --- coordinator to rollout and back ---------------------------------------------------------------------------------


class RewardServer(Message, frozen=True, kw_only=True):
    """Where the program that began the run scores responses with functions of its own."""

    port: Port
    """On the coordinator's host."""
    public_key: Key
    """Which it proves."""
    callers: KeyPair
    """By which rollouts prove that they are the run's; made for it."""


class BuildEngine(Command, frozen=True, kw_only=True, tag=True):
    """Build the generation engine, with no weights of its own, and the environments.

    An engine that is there already stays. It gives up all that it was asked for before, forgets its samples, and
    answers once nothing of that is written any more: all trainers were started again.
    """

    samples_folder: str = ""
    """Folder of the record of samples, which finished ones are written to; empty where there is none."""
    reward_server: RewardServer | None = None
    """None where the configuration says all there is to know of the environment."""


class GuestServer(Message, frozen=True, kw_only=True):
    """Where a rollout answers OpenAI's API, for who is no member of the run."""

    url: Name
    """``http://HOST:PORT``."""
    token: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Whoever asks must send it; empty on loopback, where nobody has to."""


class EngineBuilt(Message, frozen=True, kw_only=True, tag=True):
    """The engine wants weights."""

    command_id: Count
    layouts: Annotated[tuple[Encoded, ...], Meta(min_length=1)]
    """Encoded `tandem.refit.layout.Layout`s: what each of its `tandem.common.worker_shards` wants, and where."""
    samples_at: Listener
    """Where trainers fetch its samples."""
    guests: GuestServer | None = None
    """None where `policy.generation.expose_http_server` is off."""


class Problem(Message, frozen=True, kw_only=True):
    """One problem as an environment sees it."""

    problem_id: str
    """Stable and unique within the dataset; train and validation never share one."""
    question: str
    answer: str
    """The reference answer; empty where the environment does not need one."""
    metadata: dict[str, Any]
    """Whatever the scorer needs, as plain JSON values."""
    prompt: tuple[dict[str, str], ...] = ()
    """The messages that the first response answers, where the environment is a reward model; empty elsewhere."""


class PromptGroup(Message, frozen=True, kw_only=True):
    """A problem, its tokens, and how many samples to draw for it."""

    group: Count
    """Position of the group within the step's batch."""
    problem: Problem
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    seeds: Annotated[tuple[Digest, ...], Meta(min_length=1)]
    """One 64-bit seed a sample: the same seed, weights and prompt give the same sample, whatever else runs."""
    environment: str = ""
    """Entry of ``env`` that scores the samples; empty where the run has one only."""


class SamplingParameters(Message, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e6)]
    """Zero means greedy."""
    top_p: Share
    top_k: Count
    """Zero means no limit."""
    max_new_tokens: Positive
    stop_token_ids: tuple[TokenId, ...]
    stop_strings: tuple[str, ...]


class Generate(Command, frozen=True, kw_only=True, tag=True):
    """Draw samples for these groups and score them; what is known of each is sent as it finishes.

    Samples to train on stay with the rollout, until they are released; those to validate with are not kept.
    """

    cancel_before: Count
    """Orders to generate with a lower command id are given up, and what was made of their unfinished groups is
    released; the others go on beside this one."""
    step: Count
    purpose: Purpose
    sampling: SamplingParameters
    groups: tuple[PromptGroup, ...]


class Branch(Message, frozen=True, kw_only=True):
    """One sequence of an agent's episode: a path of its tree of requests, from the first to one that none follows.

    Tokens that several of them begin with count in the first.
    """

    prompt_length: Positive
    """Tokens before the first that counts here."""
    num_made: Positive
    """Tokens that count here."""
    num_tokens: Positive
    """Of the whole sequence."""


class SampleScored(Message, frozen=True, kw_only=True):
    """What is known of one finished sample beside its tokens, which stay with the rollout."""

    group: Count
    sample: Count
    """Position within its group."""
    prompt_length: Positive
    response_length: Count
    """Tokens the policy made, in all turns; none only where an agent asked for none before it failed."""
    num_tokens: Positive
    """Tokens of the whole sequence: the prompt, what the policy made, and what an environment said in between. Of an
    agent's episode, those of all of its branches."""
    branches: Annotated[tuple[Branch, ...], Meta(max_length=MAX_BRANCHES)] = ()
    """Its sequences, where an agent has made it; empty: it is one, which begins with its group's prompt."""
    oldest_version: Count
    newest_version: Count
    """The weight versions that the tokens were made with: from the oldest to this one."""
    tokens_by_version: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_VERSIONS)]
    """Tokens that each of these made, from the oldest to the newest."""
    num_turns: Count
    """Responses the policy gave: one, unless the environment answers, or an agent asks as often as it likes."""
    finish_reason: Literal["stop", "length", "turns"]
    """How the sample ended: as it should, at a limit of tokens, or at ``grpo.max_rollout_turns``."""
    reward: Finite
    components: Components = {}
    """What the environment says the reward is made of, by name."""
    spent: Components = {}
    """What scoring it has cost, by name."""
    correct: bool
    extracted_answer: str | None = None
    """What the environment took for the answer; None if it found none, looks for none, or the sample is to train on."""
    response: str
    """What followed the prompt, a line for each message, for logs; empty unless the sample is for validation."""
    failure: Text = ""
    """Why the environment gave the last response no score, on one line; empty if it did, or if a limit came first."""
    timed_out: bool = False
    """Whether that is because it took too long."""
    dropped: bool = False
    """Whether the sample counts nowhere for that (``env.NAME.on_error: drop``); else it has its turns' rewards."""


class SamplesFinished(Message, frozen=True, kw_only=True, tag=True):
    """Some samples of a `Generate`, each exactly once; the rollout keeps the tokens of those to train on."""

    command_id: Count
    step: Count
    purpose: Purpose
    samples: Annotated[tuple[SampleScored, ...], Meta(min_length=1)]


class Generated(Message, frozen=True, kw_only=True, tag=True):
    """Every sample of a `Generate` was sent."""

    command_id: Count
    step: Count
    purpose: Purpose
    num_samples: Count
    num_tokens: Count
    """Tokens the engine made."""
    seconds: SecondsByPhase
    """Seconds by phase: ``generation``, ``rewards``."""
    memory: MemoryUse
    gpus: Metrics = {}
    """The engine's GPUs since its last answer: means by the names of `tandem.observe.exporters.nvml.GpuUse`."""


class ReleaseSamples(Command, frozen=True, kw_only=True, tag=True):
    """Samples that are not needed any longer; nobody waits for an answer, and none is sent."""

    command_ids: tuple[Count, ...]
    """The `Generate` orders that they were made for."""


class RecordedGroup(Message, frozen=True, kw_only=True):
    """A group that a step has generated, as the record has it."""

    command_id: Count
    """Of the order that its samples were made for."""
    group: Count
    advantages: tuple[Finite | None, ...]
    """Of its samples, in order; null where a sample was not trained on."""


class RecordSamples(Command, frozen=True, kw_only=True, tag=True):
    """Write to the record what a step, which has trained, or was validated, had of one rollout.

    It is on disk since it finished.

    What else of that rollout's was written for the step is no part of it. Sent again, it is carried out again.
    """

    step: Count
    rollout: Name
    """Whose samples: the receiver's own, unless that rollout is lost."""
    purpose: Purpose = "train"
    groups: Annotated[tuple[RecordedGroup, ...], Meta(min_length=1)]


class SamplesRecorded(Message, frozen=True, kw_only=True, tag=True):
    """The samples are in the record."""

    command_id: Count
    step: Count
    num_samples: Count
    num_bytes: Count
    """Of the shard."""
    num_missing: Count
    """Samples that were never written, as where the disk was full."""


class RestoreSamples(Command, frozen=True, kw_only=True, tag=True):
    """Take groups that were generated before the run was resumed from disk; the answers are those to a `Generate`."""

    step: Count
    files: Annotated[dict[Text, tuple[tuple[Count, Count], ...]], Meta(min_length=1)]
    """Of each file, by its path within the folder of the record: the order that a group was made for then, and its
    number."""
    num_samples: Positive
    """Of each group."""


class TrainerKeys(Message, frozen=True, kw_only=True, tag=True):
    """Who may fetch samples. Sent to rollouts before any order that comes after a change, and again if it was lost."""

    number: Positive
    """One more with each change."""
    public_keys: tuple[Key, ...]
    """Of all trainers."""


class Leaving(Message, frozen=True, kw_only=True, tag=True):
    """The rollout was told to leave the run: it finishes what it was asked for, and waits for the `Shutdown` that lets
    it go. Said again until then, in case it was lost."""


# --- the sample plane: trainer to rollout and back --------------------------------------------------------------------

SampleKey = tuple[Count, Count, Count]
"""One sample of a rollout: command id of its `Generate`, its group, its place in the group."""

SequenceKey = tuple[Count, Count, Count, Count]
"""One sequence of it: the same, and its place among the sample's branches; 0 where it has none."""


MAX_TOKENS_FETCHED = 2**21
"""That one request may ask for, unless it asks for a single sample: the arrays of a reply are some 27 MB at most."""


class FetchSamples(Message, frozen=True, kw_only=True, tag=True):
    """A trainer rank asks a rollout for sequences of samples."""

    run_id: Name
    """Of the trainer's run, in case the address is another run's by now."""
    request_id: Count
    keys: tuple[SequenceKey, ...]


class SamplesFetched(Message, frozen=True, kw_only=True, tag=True):
    """The samples.

    Frames: the `SAMPLES` of `tandem.samples.batch`, in the order of the keys.
    """

    request_id: Count


class SamplesGone(Message, frozen=True, kw_only=True, tag=True):
    """The rollout does not have all of these samples, or not for whoever asked."""

    request_id: Count
    why: Text


# --- rollout to the program that began the run, and back --------------------------------------------------------------


class ResponseToScore(Message, frozen=True, kw_only=True):
    """A response that the functions of the program are to score."""

    number: Count
    """Of the call; its score comes back with it."""
    problem: Problem
    response: str


class ScoreResponses(Message, frozen=True, kw_only=True, tag=True):
    """A rollout asks for the scores of some responses. One that it asks for again is scored again."""

    responses: tuple[ResponseToScore, ...]


class ScoredResponse(Message, frozen=True, kw_only=True):
    """What the functions of the program said to one response: a score, or what went wrong."""

    number: Count
    reward: Finite = 0.0
    correct: bool = False
    components: Components = {}
    failure: Text = ""
    """One line; empty where there is a score."""
    traceback: Traceback = ""
    timed_out: bool = False


class ResponsesScored(Message, frozen=True, kw_only=True, tag=True):
    """Scores, as they are there: of some of the responses that were asked for, in any order."""

    scored: tuple[ScoredResponse, ...]


class StillScoring(Message, frozen=True, kw_only=True, tag=True):
    """Sent every second while a rollout waits for scores: the program is alive, and its functions are at work."""


# --- the weight plane: coordinator to trainer and rollout, and back ---------------------------------------------------


class InstallProgram(Command, frozen=True, kw_only=True, tag=True):
    """Open the memory a transfer program reads from and bind the program to the process's own tensors.

    Engines and trainer ranks alike get one.
    """

    programs: Annotated[tuple[Encoded, ...], Meta(min_length=1)]
    """An encoded `tandem.refit.program.TransferProgram` for each worker shard of the process, in order."""


class ProgramInstalled(Message, frozen=True, kw_only=True, tag=True):
    """The program is bound; a `Refit` from now on only copies."""

    command_id: Count
    num_copies: Count
    num_bytes: Count
    """Bytes one refit will move into this process; zero where every tensor is an alias."""


class ConnectMesh(Command, frozen=True, kw_only=True, tag=True):
    """Connect to the other processes of a mesh, which stream to each other; every member gets the same order.

    Again, with a new `epoch`, when one of them was replaced.
    """

    mesh: Name
    members: tuple[str, ...]
    device_type: DeviceType = "cpu"
    """Where its messages lie, as refit has planned."""
    epoch: Count
    """How often the mesh has been connected before."""
    rendezvous_host: Name
    rendezvous_port: Port


class MeshConnected(Message, frozen=True, kw_only=True, tag=True):
    """The process has reached every other member of the mesh."""

    command_id: Count
    mesh: Name


class Refit(Command, frozen=True, kw_only=True, tag=True):
    """Run the transfer program: an engine receives `version` and serves no token until it has answered; others send."""

    version: Count
    only: tuple[str, ...] = ()
    """Engines to bring to `version`; empty for all."""
    newcomers: tuple[str, ...] = ()
    """Those of them that get what never changes, too, where trainers have told of such tensors: they have none yet."""


class Refitted(Message, frozen=True, kw_only=True, tag=True):
    """The engine holds `version`, whole; a sender has sent all of it."""

    command_id: Count
    version: Count
    num_bytes: dict[Name, Count]
    """Bytes counted at this end of each link, named ``trainer-0>rollout-1``."""
    seconds: Seconds
    memory: MemoryUse


class Attest(Command, frozen=True, kw_only=True, tag=True):
    """Compute the digests of `version` from memory, beside other work; orders that come meanwhile are not held up."""

    version: Count


class Attested(Message, frozen=True, kw_only=True, tag=True):
    """What the process holds of `version`; see `tandem.refit.digests.task`."""

    command_id: Count
    version: Count
    digests: Annotated[tuple[bytes, ...], Meta(min_length=1)]
    """For each of its worker shards, its share of the digest of each tensor of its layout, in order: unsigned 64-bit
    little-endian integers."""
    seconds: Seconds
    """Time spent computing."""


# --- coordinator to refit and back -----------------------------------------------------------------------------------


class PlanTransfers(Command, frozen=True, kw_only=True, tag=True):
    """Plan how every wanted element reaches its engine."""

    sources: dict[Name, Encoded]
    """Encoded layouts of the trainer ranks, by member."""
    destinations: dict[Name, Encoded]
    """Encoded layouts of the engines, by worker shard."""
    allow_alias: bool
    """True if no engine generates while the trainer steps, on the same devices: engines may then read the trainer's
    memory in place."""
    alias_frozen: bool = False
    """Whether they may read in place what never changes."""


class PlannedMesh(Message, frozen=True, kw_only=True):
    """Processes that stream to each other."""

    name: Name
    members: tuple[Name, ...]
    device_type: DeviceType = "cpu"
    """Where its messages lie: on GPUs, whose meshes NCCL connects, if the memory of all members does."""


class TransfersPlanned(Message, frozen=True, kw_only=True, tag=True):
    """A program for each process, proven to write each wanted element exactly once."""

    command_id: Count
    programs: dict[Name, Encoded]
    """Encoded `tandem.refit.program.TransferProgram` by worker shard."""
    senders: tuple[str, ...]
    """Members that have something to do in a refit beside the engines that receive."""
    meshes: tuple[PlannedMesh, ...]
    num_bytes: dict[Name, Count]
    """Bytes one refit moves over each link between worker shards, named ``trainer-0>rollout-1``."""
    predicted_s: Annotated[float, Meta(ge=0.0, le=1e300)]
    """Seconds that a refit should take at the rates of ``cluster.links``."""
    bound_s: Annotated[float, Meta(ge=0.0, le=1e300)]
    """Seconds below which no plan could come at these rates: see `tandem.refit.cost`."""
    seconds: Seconds
    """Time spent planning."""
    num_bytes_frozen: dict[Name, Count] = {}
    """Bytes of what never changes over each link: they come on top where an engine has none of it yet."""


class CommitVersion(Command, frozen=True, kw_only=True, tag=True):
    """Compare what engines hold with what trainers meant to send, and make `version` the current one."""

    version: Count
    digests: dict[str, bytes]
    """By worker shard, of trainers and engines, as in `Attested`; empty where ``refit.verify`` is off."""
    has_update: bool
    """Whether the weights must differ from those of the version before."""


class VersionCommitted(Message, frozen=True, kw_only=True, tag=True):
    """Samples of `version` may be trained on, but for those of engines that differ."""

    command_id: Count
    version: Count
    differing: dict[Name, Text]
    """Engines that do not hold `version`, and which tensors differ; they must be refitted."""
    digest: Digest
    """Of the whole of `version`; zero where ``refit.verify`` is off."""


Membership = Hello | Heartbeat | Goodbye | Failed
"""What any process may send to the coordinator."""

Admission = Enrolled | Welcome | Refused | Heartbeat | Shutdown
"""What the coordinator may send to any process."""

PlaneOrder = InstallProgram | ConnectMesh | Refit | Attest
"""What trainers and engines alike do for the weight plane."""
PlaneReply = ProgramInstalled | MeshConnected | Refitted | Attested

TrainerOrder = (
    OpenRendezvous | BuildTrainer | PlaneOrder | Train | Evaluate | SaveCheckpoint | AwaitCheckpoint | CopyWeights
)
RolloutOrder = BuildEngine | PlaneOrder | Generate | RestoreSamples | RecordSamples | ReleaseSamples
RefitOrder = PlanTransfers | CommitVersion
Order = TrainerOrder | RolloutOrder | RefitOrder

TrainerReply = (
    RendezvousOpened
    | TrainerBuilt
    | PlaneReply
    | Trained
    | SamplesMissing
    | Evaluated
    | CheckpointCopied
    | CheckpointSaved
    | WeightsCopied
)
RolloutReply = EngineBuilt | PlaneReply | SamplesFinished | Generated | SamplesRecorded
RefitReply = TransfersPlanned | VersionCommitted
Reply = TrainerReply | RolloutReply | RefitReply

ToTrainer = Admission | TrainerOrder
FromTrainer = Membership | TrainerReply

ToRollout = Admission | TrainerKeys | RolloutOrder
FromRollout = Membership | Leaving | RolloutReply

ToRefit = Admission | RefitOrder
FromRefit = Membership | RefitReply

ToSampleStore = FetchSamples
FromSampleStore = SamplesFetched | SamplesGone

ToRewardServer = ScoreResponses
FromRewardServer = ResponsesScored | StillScoring
