"""The structs of the configuration, by theme; docs/configuration.md is generated from them."""

from __future__ import annotations

from tandem.config.schema.algorithms import DpoConfig, RewardModelConfig, SftConfig
from tandem.config.schema.base import ConfigSection
from tandem.config.schema.data import DataConfig, EnvironmentConfig, JudgeConfig
from tandem.config.schema.evaluation import EvalConfig
from tandem.config.schema.generation import (
    ColocatedConfig,
    ColocatedResources,
    GenerationConfig,
    TransformersCfg,
    VllmCfg,
)
from tandem.config.schema.grpo import AdvEstimator, AsyncGrpo, GrpoConfig, RewardScaling, RewardShaping, RolloutsConfig
from tandem.config.schema.loss import LossColumn, LossFn
from tandem.config.schema.megatron import MegatronCfg, MegatronScheduler
from tandem.config.schema.policy import (
    DtensorCfg,
    DynamicBatching,
    ModelConfig,
    NewModel,
    OptimizerConfig,
    PackingAlgorithm,
    PolicyConfig,
    SchedulerEntry,
    SequencePacking,
    TokenizerConfig,
)
from tandem.config.schema.ppo import AsyncPpo, GaeEstimator, PpoConfig, ValueConfig, ValueLossFn
from tandem.config.schema.root import MODELS, Config
from tandem.config.schema.run import (
    CheckpointingConfig,
    ClusterConfig,
    GpuMonitoring,
    LaunchConfig,
    LinkRates,
    LoggerConfig,
    MlflowConfig,
    OpenTelemetry,
    ProcessesOf,
    PrometheusConfig,
    RefitConfig,
    ReplayConfig,
    ReplyDeadlines,
    TensorboardConfig,
    WandbConfig,
)

__all__ = [
    "MODELS",
    "AdvEstimator",
    "AsyncGrpo",
    "AsyncPpo",
    "CheckpointingConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "ColocatedResources",
    "Config",
    "ConfigSection",
    "DataConfig",
    "DpoConfig",
    "DtensorCfg",
    "DynamicBatching",
    "EnvironmentConfig",
    "EvalConfig",
    "GaeEstimator",
    "GenerationConfig",
    "GpuMonitoring",
    "GrpoConfig",
    "JudgeConfig",
    "LaunchConfig",
    "LinkRates",
    "LoggerConfig",
    "LossColumn",
    "LossFn",
    "MegatronCfg",
    "MegatronScheduler",
    "MlflowConfig",
    "ModelConfig",
    "NewModel",
    "OpenTelemetry",
    "OptimizerConfig",
    "PackingAlgorithm",
    "PolicyConfig",
    "PpoConfig",
    "ProcessesOf",
    "PrometheusConfig",
    "RefitConfig",
    "ReplayConfig",
    "ReplyDeadlines",
    "RewardModelConfig",
    "RewardScaling",
    "RewardShaping",
    "RolloutsConfig",
    "SchedulerEntry",
    "SequencePacking",
    "SftConfig",
    "TensorboardConfig",
    "TokenizerConfig",
    "TransformersCfg",
    "ValueConfig",
    "ValueLossFn",
    "VllmCfg",
    "WandbConfig",
]
