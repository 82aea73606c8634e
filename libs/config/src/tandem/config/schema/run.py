"""The run itself: checkpoints, logs, processes and the weight plane."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
)

DURATION = r"^\d+:\d\d:\d\d:\d\d$"
Duration = Annotated[str, Meta(pattern=DURATION)]
"""Days, hours, minutes and seconds."""


class Checkpointing(Section, frozen=True, kw_only=True):
    """When checkpoints are saved and which are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: NonEmptyStr
    """Folder of the checkpoints; relative to the working directory."""
    metric_name: NonEmptyStr
    """The metric that ranks checkpoints; those that begin with val_ are the last validation's. Of several validation
    sets one may do so alone (``val_NAME/accuracy``). NeMo-RL's names, such as ``val:accuracy``, are taken."""
    higher_is_better: bool
    """Whether a higher metric is better."""
    keep_top_k: PositiveInt | None = 3
    """Checkpoints to keep, beside the newest; null keeps all."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved."""
    checkpoint_must_save_by: Duration | None = None
    """Time after its start at which the run has saved a checkpoint, and ends, as ``days:hours:minutes:seconds``: for
    machines that are lent for so long. ``--resume`` goes on from there. Null means that it goes on to its end."""
    model_save_format: Literal["safetensors", "torch_save"] | None = None
    """Accepted: the format of the weights, which is safetensors here."""
    save_consolidated: bool = False
    """Accepted: whether NeMo-RL gathers the weights in one place; a checkpoint always has them in Hugging Face's
    layout."""
    save_optimizer: bool = True
    """Accepted: whether a checkpoint has the optimizer's state. It always does: a resumed run goes on as though it had
    not ended."""


class Replay(Section, frozen=True, kw_only=True):
    """The run whose recorded samples are trained on again; `coordinator replay` sets this section."""

    run: NonEmptyStr
    """New. Its run folder; relative to the working directory."""
    run_id: NonEmptyStr
    """New. Its name in its journal: no other run's samples are read, should another be in that folder."""
    from_step: NonNegativeInt
    """New. The step whose checkpoint training goes on from; 0 is the model that the run started from."""
    to_step: PositiveInt
    """New. The last step to train on."""


class Wandb(Section, frozen=True, kw_only=True):
    """Weights & Biases."""

    project: NonEmptyStr = "tandem"
    """Project to log to."""
    name: NonEmptyStr | None = None
    """Name of the run there; null lets the service choose."""


class Mlflow(Section, frozen=True, kw_only=True):
    """MLflow."""

    experiment_name: NonEmptyStr = "tandem"
    """Experiment to log to; it is made if there is none."""
    run_name: NonEmptyStr | None = None
    """Name of the run there; null lets MLflow choose."""
    tracking_uri: NonEmptyStr | None = None
    """Where MLflow keeps its runs, such as ``http://host:5000``; null takes ``MLFLOW_TRACKING_URI``, and where that is
    not set either, the folder ``mlflow`` in `logger.log_dir`."""


class Swanlab(Section, frozen=True, kw_only=True):
    """SwanLab."""

    project: NonEmptyStr = "tandem"
    """Project to log to."""
    name: NonEmptyStr | None = None
    """Name of the run there; null lets the service choose."""


class Tensorboard(Section, frozen=True, kw_only=True):
    """TensorBoard."""

    log_dir: NonEmptyStr = "tensorboard"
    """Folder of the event files, within `logger.log_dir`."""


class GpuMonitoring(Section, frozen=True, kw_only=True):
    """How GPUs are watched where `logger.monitor_gpus` is set."""

    collection_interval: PositiveFloat = 10.0
    """Seconds between readings."""
    flush_interval: PositiveFloat = 10.0
    """Accepted for NeMo-RL's sake: what was read is written with each step."""


class Prometheus(Section, frozen=True, kw_only=True):
    """Metrics for Prometheus to scrape from the coordinator; needs the extra ``prometheus``."""

    port: Port | None = None
    """New. The port on which ``/metrics`` is served while the run goes on, which must be free; null serves nothing."""
    host: NonEmptyStr = "127.0.0.1"
    """New. The address to listen on. Who can reach it can read the metrics: nobody is asked who they are."""


class OpenTelemetry(Section, frozen=True, kw_only=True):
    """Spans of steps, refits and requests for OpenTelemetry; needs the extra ``opentelemetry``."""

    endpoint: NonEmptyStr | None = None
    """New. Where a collector takes spans by OTLP over HTTP, such as ``http://localhost:4318/v1/traces``; null sends
    none."""


class Logger(Section, frozen=True, kw_only=True):
    """Where results go."""

    log_dir: NonEmptyStr = "logs"
    """The run folder: journal, resolved configuration, logs of each process, TensorBoard files. Relative to the working
    directory."""
    wandb_enabled: bool = False
    """Log to Weights & Biases; needs the extra ``wandb``."""
    tensorboard_enabled: bool = True
    """Log to TensorBoard."""
    mlflow_enabled: bool = False
    """Log to MLflow; needs the extra ``mlflow``."""
    swanlab_enabled: bool = False
    """Log to SwanLab."""
    monitor_gpus: bool = False
    """Watch the GPUs of trainers and engines by NVML, and have a step's metrics say what they did meanwhile. Accepted
    everywhere, because NeMo-RL's base files say true: without a GPU there is nothing to say."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation samples printed each time: those of other problems than the last time, as far as there are others."""
    samples: Literal["all", "off"] | PositiveFloat = 10.0
    """New. The record of the samples of training and validation, and of trainers' log-probabilities, in
    `logger.log_dir`/samples: all, off, or how many gigabytes (10^9 bytes) are kept at most; then the oldest steps are
    deleted."""
    page: Literal["auto", "off"] | Port = "auto"
    """New. The page that shows the run in a browser of this machine, by a process of its own: auto, off, or the port
    that it listens on, which must be free. auto: the first free one from 8700 on."""
    wandb: Wandb = Wandb()
    mlflow: Mlflow = Mlflow()
    swanlab: Swanlab = Swanlab()
    tensorboard: Tensorboard = Tensorboard()
    gpu_monitoring: GpuMonitoring = GpuMonitoring()
    prometheus: Prometheus = Prometheus()
    opentelemetry: OpenTelemetry = OpenTelemetry()


class Launch(Section, frozen=True, kw_only=True):
    """How many processes the coordinator launches itself; the rest are started by hand and join."""

    trainers: NonNegativeInt = 0
    """New. Trainer processes to launch."""
    rollouts: NonNegativeInt = 0
    """New. Rollout processes to launch."""
    refit: bool = False
    """New. Launch the refit process."""


class Deadlines(Section, frozen=True, kw_only=True):
    """How long the coordinator waits for each kind of answer, in seconds, before the run fails."""

    join_s: PositiveFloat = 120.0
    """New. For every process to join."""
    build_s: PositiveFloat = 300.0
    """New. For models and engines to be built."""
    generate_s: PositiveFloat = 600.0
    """New. For one rollout batch; where engines generate for several steps at once, each of them has as long."""
    train_s: PositiveFloat = 600.0
    """New. For one training step."""
    refit_s: PositiveFloat = 60.0
    """New. For one refit, from prepare to commit."""
    save_s: PositiveFloat = 300.0
    """New. For one checkpoint."""
    evaluate_s: PositiveFloat = 300.0
    """New. For the loss of one validation batch."""
    leave_s: PositiveFloat = 300.0
    """New. For a rollout that was told to leave: to finish what it generates, and for trainers to fetch its samples.
    Then it goes at once, and others make them again."""


class DataPlane(Section, frozen=True, kw_only=True):
    """Accepted: how samples travel between NeMo-RL's processes. Here they go from the engine that made them straight to
    the ranks that train on them, and nothing of it is to be set."""

    enabled: bool = False
    """Use it."""
    impl: NonEmptyStr = "transfer_queue"
    """Which one."""
    backend: NonEmptyStr = "simple"
    """What stores samples."""
    claim_meta_poll_interval_s: PositiveFloat = 0.5
    """Seconds between looks for samples."""
    global_segment_size: PositiveInt | None = None
    """Bytes that all processes share."""
    local_buffer_size: PositiveInt | None = None
    """Bytes of each process."""
    num_storage_units: PositiveInt = 2
    """Processes that store samples."""
    storage_capacity: PositiveInt | None = None
    """Samples that they store."""


class LinkRates(Section, frozen=True, kw_only=True):
    """How fast bytes move, in GB/s (10^9 bytes); what `coordinator plan` predicts with. Nothing else depends on it.

    Measure yours: `coordinator doctor` prints this section. Between two nodes ``nccl-tests``' ``sendrecv`` tells what
    NCCL makes of their network, which can be much more than the one TCP connection that doctor measures.
    """

    memory: PositiveFloat = 5.0
    """New. One process copying from another's memory on the same host."""
    same_gpu: PositiveFloat = 1500.0
    """New. Copying within a GPU's memory: bytes copied, each of which is read and written."""
    peer_gpu: PositiveFloat = 350.0
    """New. Between two GPUs of a node, in each direction of each GPU."""
    network: PositiveFloat = 45.0
    """New. Between nodes, in each direction of each process: one 400 Gb/s card for each GPU."""


class ProcessesOf(Section, frozen=True, kw_only=True):
    """Trainer processes that hold one model alone, beside `cluster.trainers`: it scores, and a value model trains,
    while the policy does. 0: the model lives in the policy's processes, which use it in turns."""

    reference: NonNegativeInt = 0
    """New. Processes of the policy before any training. Its parallel sizes are the policy's."""
    value: NonNegativeInt = 0
    """New. Processes of PPO's value model, which is trained there."""
    teacher: NonNegativeInt = 0
    """New. Processes of the teacher of distillation, or of all teachers."""


class Cluster(Section, frozen=True, kw_only=True):
    """Which processes the run has, and where."""

    gpus_per_node: NonNegativeInt = 1
    """GPUs a node; processes take one each as long as there are any, and the CPU otherwise."""
    num_nodes: PositiveInt = 1
    """Nodes of the run."""
    segment_size: PositiveInt | None = None
    """Accepted: nodes that NeMo-RL wants to share fast links. What starts the nodes chooses them here."""
    master_port_range_low: Port | None = None
    """Accepted: the lowest port of NeMo-RL's process groups. Here the system chooses free ones."""
    master_port_range_high: Port | None = None
    """Accepted: the highest."""
    trainers: PositiveInt
    """New. Trainer processes, or ranks, that hold the policy, and every model without `cluster.processes_of`."""
    processes_of: ProcessesOf = ProcessesOf()
    rollouts: NonNegativeInt
    """New. Rollout processes: generation engines. SFT, DPO and RM have none, whatever this says."""
    max_rollouts: PositiveInt | None = None
    """New. How many rollouts the run may have at once. More than `cluster.rollouts` may be started by hand while it
    goes on, and join it. null: as many as come."""
    launch: Literal["all", "none"] | Launch
    """New. What the coordinator launches on its own machine: all, none, or a count of each."""
    address: NonEmptyStr = "tcp://127.0.0.1:*"
    """New. Where the coordinator listens, ``tcp://host:port``; ``*`` picks a free port."""
    threads_per_process: PositiveInt | None = None
    """New. CPU threads of each process; null shares the cores among the processes of one kind that are launched
    here."""
    heartbeat_interval_s: PositiveFloat = 1.0
    """New. Seconds between signs of life, in both directions."""
    heartbeat_timeout_s: PositiveFloat = 15.0
    """New. Seconds of silence after which a process counts as lost."""
    orphan_timeout_s: NonNegativeFloat | None = None
    """New. Seconds for which services wait for another coordinator when theirs is lost, after
    `cluster.heartbeat_timeout_s` of silence: engines keep their memory, and the coordinator that goes on with the run
    takes them up. null: 300 with ``coordinator up --supervise``, and otherwise 0, with which they end."""
    max_replacements: NonNegativeInt = 3
    """New. How many processes of whatever kind may be lost, or hang, and be replaced within
    `cluster.replacement_window_s` before the run fails. Trainers are started again together, which counts once;
    coordinators that ``--supervise`` starts again count as well. With 0 the first loss ends the run, and ``--resume``
    goes on."""
    replacement_window_s: PositiveFloat = 3600.0
    """New. Seconds after which a loss does not count any more for `cluster.max_replacements`: a run of weeks may lose a
    process now and then, and one that loses them one after the other does not get on."""
    links: LinkRates = LinkRates()
    deadlines: Deadlines = Deadlines()


class Refit(Section, frozen=True, kw_only=True):
    """How weights reach the engines."""

    alias: Literal["auto", "never"] = "auto"
    """New. auto: an engine reads the trainer's memory in place where layout and element type agree and training and
    generation are colocated (`policy.generation.colocated.enabled`). never: it always copies."""
    verify: Literal["off", "sampled", "full"] = "full"
    """New. Whether digests of what engines hold are compared with the trainer's before samples of a version are trained
    on. They are computed beside generation. full: of every element. sampled: of a part that changes from version to
    version. off: not at all."""
    keep_copy: Literal["auto", "on", "off"] = "auto"
    """New. Whether every trainer keeps a second copy of its weights, which engines read, so that it can train on at
    once while some of them still finish samples with older weights (`async_grpo`). It takes as much memory as the
    weights. auto: where samples may be more than one step old, engines do not take weights in flight, and all are on
    one node."""
