"""The run itself: checkpoints, logs, processes and the weight plane."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import (
    ConfigSection,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
)

DURATION = r"^\d+:\d\d:\d\d:\d\d$"
Duration = Annotated[str, Meta(pattern=DURATION)]
"""A duration as days, hours, minutes and seconds."""


class CheckpointingConfig(ConfigSection, frozen=True, kw_only=True):
    """When checkpoints are saved and which are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: NonEmptyStr
    """Folder of the checkpoints; relative to the working directory."""
    metric_name: NonEmptyStr
    """Metric that ranks checkpoints; a name with val_ is of the validation of the checkpoint's own step. A checkpoint
    without the metric ranks below all others, as in NeMo-RL. It may be the metric of one of several validation sets
    (``val_NAME/accuracy``). NeMo-RL's names, such as ``val:accuracy``, are accepted."""
    higher_is_better: bool
    """Whether a higher metric is better."""
    keep_top_k: PositiveInt | None = 3
    """Checkpoints to keep, beside the newest; null keeps all."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step is always saved."""
    checkpoint_must_save_by: Duration | None = None
    """Time since its start by which the run saves a checkpoint and ends, as ``days:hours:minutes:seconds``, for
    machines with a time limit. ``--resume`` continues from there. Null means no limit."""
    model_save_format: Literal["safetensors", "torch_save"] | None = None
    """Accepted: the format of the weights. Here it is always safetensors."""
    save_consolidated: bool = False
    """Accepted: whether NeMo-RL gathers the weights in one place. Here a checkpoint always has Hugging Face's
    layout."""
    save_optimizer: bool = True
    """Accepted: whether a checkpoint has the optimizer's state. Here it always does, so that a run resumes exactly."""


class ReplayConfig(ConfigSection, frozen=True, kw_only=True):
    """The run that provides the rollout log to train on again; `coordinator replay` sets this section."""

    run: NonEmptyStr
    """New. Run folder; relative to the working directory."""
    run_id: NonEmptyStr
    """New. Id of the run in its journal, so that no other run's samples are read from the same folder."""
    from_step: NonNegativeInt
    """New. Step of the checkpoint from which training continues; 0 is the run's initial model."""
    to_step: PositiveInt
    """New. Last step to train on."""
    without: NonEmptyStr | None = None
    """New. File that names samples to leave out, or to give another reward; null means all as recorded."""


class WandbConfig(ConfigSection, frozen=True, kw_only=True):
    """Weights & Biases."""

    project: NonEmptyStr = "tandem"
    """Project to log to."""
    name: NonEmptyStr | None = None
    """Name of the run there; null lets the service choose."""


class MlflowConfig(ConfigSection, frozen=True, kw_only=True):
    """MLflow."""

    experiment_name: NonEmptyStr = "tandem"
    """Experiment to log to; created if missing."""
    run_name: NonEmptyStr | None = None
    """Name of the run there; null lets MLflow choose."""
    tracking_uri: NonEmptyStr | None = None
    """Location of MLflow's runs, such as ``http://host:5000``; null means ``MLFLOW_TRACKING_URI`` or, if that is
    not set either, the folder ``mlflow`` in `logger.log_dir`."""


class SwanlabConfig(ConfigSection, frozen=True, kw_only=True):
    """SwanLab."""

    project: NonEmptyStr = "tandem"
    """Project to log to."""
    name: NonEmptyStr | None = None
    """Name of the run there; null lets the service choose."""


class TensorboardConfig(ConfigSection, frozen=True, kw_only=True):
    """TensorBoard."""

    log_dir: NonEmptyStr = "tensorboard"
    """Folder of the event files, within `logger.log_dir`."""


class GpuMonitoring(ConfigSection, frozen=True, kw_only=True):
    """Sampling of GPU metrics if `logger.monitor_gpus` is set."""

    collection_interval: PositiveFloat = 10.0
    """Seconds between readings."""
    flush_interval: PositiveFloat = 10.0
    """Accepted: NeMo-RL's interval of writing. Here readings are written with each step."""


class PrometheusConfig(ConfigSection, frozen=True, kw_only=True):
    """Metrics for Prometheus to scrape from the coordinator; needs the extra ``prometheus``."""

    port: Port | None = None
    """New. Port on which ``/metrics`` is served during the run, which must be free; null disables it."""
    host: NonEmptyStr = "127.0.0.1"
    """New. Address to listen on. There is no authentication: every client that reaches it can read the metrics."""


class OpenTelemetry(ConfigSection, frozen=True, kw_only=True):
    """Spans of steps, refits and requests for OpenTelemetry; needs the extra ``opentelemetry``."""

    endpoint: NonEmptyStr | None = None
    """New. OTLP-over-HTTP endpoint of a collector, such as ``http://localhost:4318/v1/traces``; null sends no spans."""


class LoggerConfig(ConfigSection, frozen=True, kw_only=True):
    """Destinations of results."""

    log_dir: NonEmptyStr = "logs"
    """The run folder: journal, resolved configuration, logs of each process, TensorBoard files. Relative to the
    working directory."""
    wandb_enabled: bool = False
    """Log to Weights & Biases; needs the extra ``wandb``."""
    tensorboard_enabled: bool = True
    """Log to TensorBoard."""
    mlflow_enabled: bool = False
    """Log to MLflow; needs the extra ``mlflow``."""
    swanlab_enabled: bool = False
    """Log to SwanLab."""
    monitor_gpus: bool = False
    """Read the GPUs of trainers and engines through NVML, for the metrics of each step. NeMo-RL's base files have
    true, so it is accepted everywhere; without a GPU it has no effect."""
    num_val_samples_to_print: NonNegativeInt = 0
    """Validation samples printed each time, from other problems than the last time as long as there are others."""
    samples: Literal["all", "off"] | PositiveFloat = 10.0
    """New. The rollout log of training and validation samples and trainers' log-probabilities, in
    `logger.log_dir`/samples: all, off, or the limit in gigabytes (10^9 bytes), beyond which the oldest steps are
    deleted."""
    page: Literal["auto", "off"] | Port = "auto"
    """New. The page that shows the run in a browser on this machine, from a process of its own: auto, off, or its
    port, which must be free. auto means the first free port from 8700 on."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    swanlab: SwanlabConfig = SwanlabConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    gpu_monitoring: GpuMonitoring = GpuMonitoring()
    prometheus: PrometheusConfig = PrometheusConfig()
    opentelemetry: OpenTelemetry = OpenTelemetry()


class LaunchConfig(ConfigSection, frozen=True, kw_only=True):
    """Number of processes that the coordinator launches itself; the others are started by hand and join."""

    trainers: NonNegativeInt = 0
    """New. Trainer processes to launch."""
    rollouts: NonNegativeInt = 0
    """New. Rollout processes to launch."""
    refit: bool = False
    """New. Launch the refit process."""


class ReplyDeadlines(ConfigSection, frozen=True, kw_only=True):
    """Timeouts of the coordinator for each kind of reply, in seconds, after which the run fails."""

    join_s: PositiveFloat = 120.0
    """New. Deadline for all processes to join."""
    build_s: PositiveFloat = 300.0
    """New. Deadline for building models and engines."""
    generate_s: PositiveFloat = 600.0
    """New. Deadline for one rollout batch; each of several that are generated at once has as long."""
    train_s: PositiveFloat = 600.0
    """New. Deadline for one training step."""
    refit_s: PositiveFloat = 60.0
    """New. Deadline for one refit, from prepare to commit."""
    save_s: PositiveFloat = 300.0
    """New. Deadline for one checkpoint."""
    evaluate_s: PositiveFloat = 300.0
    """New. Deadline for the loss of one validation batch."""
    leave_s: PositiveFloat = 300.0
    """New. Deadline for a draining rollout to finish generating, and for trainers to fetch its samples. After that
    it leaves at once, and other engines generate its samples again."""


class DataPlane(ConfigSection, frozen=True, kw_only=True):
    """Accepted: transport of samples between NeMo-RL's processes. Here samples go straight from engines to the ranks
    that train on them, without settings."""

    enabled: bool = False
    """Enable it."""
    impl: NonEmptyStr = "transfer_queue"
    """Implementation."""
    backend: NonEmptyStr = "simple"
    """Storage of samples."""
    claim_meta_poll_interval_s: PositiveFloat = 0.5
    """Seconds between polls for samples."""
    global_segment_size: PositiveInt | None = None
    """Bytes shared by all processes."""
    local_buffer_size: PositiveInt | None = None
    """Bytes per process."""
    num_storage_units: PositiveInt = 2
    """Processes that store samples."""
    storage_capacity: PositiveInt | None = None
    """Most samples that they store."""


class LinkRates(ConfigSection, frozen=True, kw_only=True):
    """Transfer rates in GB/s (10^9 bytes), for the predictions of `coordinator plan` only.

    Measure yours: `coordinator doctor` prints this section. Between two nodes, ``nccl-tests``' ``sendrecv`` measures
    the rate of NCCL. It can be much higher than that of the single TCP connection measured by doctor.
    """

    memory: PositiveFloat = 5.0
    """New. Copies from another process's memory on the same host."""
    same_gpu: PositiveFloat = 1500.0
    """New. Copies within a GPU's memory, in bytes copied; each is read and written."""
    peer_gpu: PositiveFloat = 350.0
    """New. Transfers between two GPUs of a node, in each direction of each GPU."""
    network: PositiveFloat = 45.0
    """New. Transfers between nodes, in each direction of each process: one 400 Gb/s card for each GPU."""


class ProcessesOf(ConfigSection, frozen=True, kw_only=True):
    """Trainer processes that hold only one model, beside `cluster.trainers`: the model works while the policy does.
    0: the model lives in the policy's processes, which alternate between both."""

    reference: NonNegativeInt = 0
    """New. Processes of the policy before any training. Its parallel sizes are the policy's."""
    value: NonNegativeInt = 0
    """New. Processes of PPO's value model, which is trained there."""
    teacher: NonNegativeInt = 0
    """New. Processes of the teacher of distillation, or of all teachers."""


class ClusterConfig(ConfigSection, frozen=True, kw_only=True):
    """The processes of the run, and their nodes."""

    gpus_per_node: NonNegativeInt = 1
    """GPUs per node; processes take one each as long as there are any, and the CPU otherwise."""
    num_nodes: PositiveInt = 1
    """Number of nodes."""
    segment_size: PositiveInt | None = None
    """Accepted: number of nodes that share fast links in NeMo-RL. Here the launcher chooses the nodes."""
    master_port_range_low: Port | None = None
    """Accepted: the lowest port of NeMo-RL's process groups. Here the system chooses free ports."""
    master_port_range_high: Port | None = None
    """Accepted: the highest such port."""
    trainers: PositiveInt
    """New. Trainer processes (ranks) that hold the policy, and every model without `cluster.processes_of`."""
    processes_of: ProcessesOf = ProcessesOf()
    rollouts: NonNegativeInt
    """New. Rollout processes: generation engines. SFT, DPO and RM have none, regardless of this key."""
    max_rollouts: PositiveInt | None = None
    """New. Most rollouts at once. More than `cluster.rollouts` may be started by hand during the run and join it.
    null means no limit."""
    launch: Literal["all", "none"] | LaunchConfig
    """New. Processes that the coordinator launches on its own machine: all, none, or a count of each kind."""
    address: NonEmptyStr = "tcp://127.0.0.1:*"
    """New. Address on which the coordinator listens, ``tcp://host:port``; ``*`` picks a free port."""
    threads_per_process: PositiveInt | None = None
    """New. CPU threads of each process; null divides the cores among the launched processes of one kind."""
    heartbeat_interval_s: PositiveFloat = 1.0
    """New. Seconds between heartbeats, in both directions."""
    heartbeat_timeout_s: PositiveFloat = 15.0
    """New. Seconds of silence after which a process counts as lost."""
    orphan_timeout_s: NonNegativeFloat | None = None
    """New. Seconds that services wait for another coordinator when theirs is lost, after
    `cluster.heartbeat_timeout_s` of silence. Engines keep their memory, and the coordinator that resumes the run
    readmits them. null means 300 with ``coordinator up --supervise``, and otherwise 0, which ends services at once."""
    max_replacements: NonNegativeInt = 3
    """New. Most processes of any kind that may be lost or hang, and be replaced, within
    `cluster.replacement_window_s` before the run fails. A restart of all trainers counts once, and restarts of
    coordinators by ``--supervise`` count too. With 0, the first loss ends the run, and ``--resume`` continues it."""
    replacement_window_s: PositiveFloat = 3600.0
    """New. Seconds after which a loss no longer counts towards `cluster.max_replacements`: a run of weeks may lose a
    process now and then, but one that loses them in quick succession makes no progress."""
    links: LinkRates = LinkRates()
    deadlines: ReplyDeadlines = ReplyDeadlines()


class RefitConfig(ConfigSection, frozen=True, kw_only=True):
    """Transfer of weights to the engines."""

    alias: Literal["auto", "never"] = "auto"
    """New. auto: an engine reads the trainer's memory in place (zero-copy) if layouts and element types agree and
    training and generation are colocated (`policy.generation.colocated.enabled`). never: it always copies."""
    verify: Literal["off", "sampled", "full"] = "full"
    """New. Whether digests of the engines' weights are compared with the trainer's before samples of a version are
    trained on. They are computed during generation. full: of every element. sampled: of a part that changes with the
    version. off: not at all."""
    keep_copy: Literal["auto", "on", "off"] = "auto"
    """New. Whether every trainer keeps a second copy of its weights for engines to read. It can then train on at
    once while some engines finish samples with older weights (`async_grpo`, `async_ppo`). The copy takes as much
    memory as the weights. auto: if samples may be more than one step old, engines do not take weights in flight, and
    there is only one node."""
    differences: Literal["auto", "off"] = "off"
    """New. Whether weights that are streamed to an engine which holds the version before are sent as what changed
    since. They are verified like whole ones. auto: yes, unless more than a sixteenth of a message has changed and
    `cluster.links.network` is above 0.25 GB/s. Each trainer keeps a copy of what it sends, in the engines' element
    type. Adapters are always sent whole. off: everything is sent at every version."""
    stream: Literal["group", "tcp"] = "group"
    """New. What carries streamed weights. group: gloo, and NCCL between GPUs; neither authenticates or encrypts. tcp:
    ZeroMQ's TCP connections, which do both; a GPU's weights go through host memory."""
    store: NonEmptyStr | None = None
    """New. Where trainers write each version once, for engines to read that would be streamed to otherwise:
    ``s3://BUCKET/FOLDER``, ``file:///FOLDER``, or whatever else fsspec has a client for; credentials come by that
    client's own means. Versions are verified like all others. A store that is down holds a refit up, at most for
    `cluster.deadlines.refit_s`, and once more. null: weights are streamed."""
    store_whole_every: PositiveInt = 16
    """New. Most versions in `refit.store` of which each is written as what changed since the one before, and the first
    whole. It is sooner where the differences come to more than a whole version."""
