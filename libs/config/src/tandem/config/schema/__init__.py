"""The structs of the configuration, by theme; docs/configuration.md is generated from them."""

from __future__ import annotations

from tandem.config.schema.algorithms import Dpo, Rm, Sft
from tandem.config.schema.base import Section
from tandem.config.schema.data import Data, Environment, Judge
from tandem.config.schema.evaluation import Eval
from tandem.config.schema.generation import (
    Colocated,
    ColocatedResources,
    Generation,
    TransformersCfg,
    VllmCfg,
)
from tandem.config.schema.grpo import AdvEstimator, AsyncGrpo, Grpo, RewardScaling, RewardShaping, Rollouts
from tandem.config.schema.loss import LossColumn, LossFn
from tandem.config.schema.megatron import MegatronCfg, MegatronScheduler
from tandem.config.schema.policy import (
    DtensorCfg,
    DynamicBatching,
    Model,
    NewModel,
    Optimizer,
    PackingAlgorithm,
    Policy,
    SchedulerEntry,
    SequencePacking,
    Tokenizer,
)
from tandem.config.schema.ppo import AsyncPpo, GaeEstimator, Ppo, Value, ValueLossFn
from tandem.config.schema.root import MODELS, Config
from tandem.config.schema.run import (
    Checkpointing,
    Cluster,
    Deadlines,
    GpuMonitoring,
    Launch,
    LinkRates,
    Logger,
    Mlflow,
    OpenTelemetry,
    ProcessesOf,
    Prometheus,
    Refit,
    Replay,
    Tensorboard,
    Wandb,
)

__all__ = [
    "MODELS",
    "AdvEstimator",
    "AsyncGrpo",
    "AsyncPpo",
    "Checkpointing",
    "Cluster",
    "Colocated",
    "ColocatedResources",
    "Config",
    "Data",
    "Deadlines",
    "Dpo",
    "DtensorCfg",
    "DynamicBatching",
    "Environment",
    "Eval",
    "GaeEstimator",
    "Generation",
    "GpuMonitoring",
    "Grpo",
    "Judge",
    "Launch",
    "LinkRates",
    "Logger",
    "LossColumn",
    "LossFn",
    "MegatronCfg",
    "MegatronScheduler",
    "Mlflow",
    "Model",
    "NewModel",
    "OpenTelemetry",
    "Optimizer",
    "PackingAlgorithm",
    "Policy",
    "Ppo",
    "ProcessesOf",
    "Prometheus",
    "Refit",
    "Replay",
    "RewardScaling",
    "RewardShaping",
    "Rm",
    "Rollouts",
    "SchedulerEntry",
    "Section",
    "SequencePacking",
    "Sft",
    "Tensorboard",
    "Tokenizer",
    "TransformersCfg",
    "Value",
    "ValueLossFn",
    "VllmCfg",
    "Wandb",
]
