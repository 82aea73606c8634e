"""The checks before a run starts, for `check` and `up`: every problem that can be known by then.

They write no lasting file, and start no service. Data is read, and a few of its items are tokenised. Custom code is
imported in a process of its own, within a deadline.

The number of steps that schedules span is decided once, when a run begins. Megatron-Core's schedules span it, and
warm-ups that are a share of the run. It is the run's own: the smaller of
``max_num_steps`` and ``max_num_epochs``, as in NeMo-RL v0.7, which writes it to ``megatron_cfg.train_iters`` too, and
in Transformers. A run that was resumed with another ``max_num_steps`` keeps it, unless
``override_opt_param_scheduler`` says otherwise, and keeps its warm-up in any case.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.common import descriptors, gc_tuning, wire
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.distribution import install_command, search_path
from tandem.common.errors import ConfigError, DataError, ModelError, TandemError
from tandem.config import Config, about_learning_rate, config_from_json, load_config, notices
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.config.derive import compute_warmup_length, make_linear_warmup
from tandem.config.installed.sources import find_package
from tandem.config.models.model_sizes import read_model_config
from tandem.config.schema import ModelConfig, SchedulerEntry
from tandem.config.threads import refuse_threads
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.model_folders import check_model, check_reward_models, check_teachers, check_value_model
from tandem.coordinator.observers.watching import serve_prometheus
from tandem.coordinator.preparing.prerequisite import CheckedConfig, differences
from tandem.launch.helper_process import open_page_socket
from tandem.launch.launch import make_importable
from tandem.launch.nodes import launched_processes
from tandem.launch.preparing import needed_models
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.launch.preparing.custom_code import import_apart
from tandem.launch.preparing.hub_data import find_data
from tandem.observe.run_folder.journal import read_journal
from tandem.samples.model_files import check_new_model_type, inline_templates, load_tokenizer, write_new_model
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.tokenizer import Tokenizer

Section = TypeVar("Section", bound=ModelConfig)


def set_run_length(config: Config, num_steps: int, mode: Mode) -> Config:
    """Return the configuration with the steps of the run in the schedules of the models that are trained.

    They are in ``train_iters`` where Megatron-Core trains, and in warm-ups that are a share of the run. A replay keeps
    what its run had.
    """
    trained = [section for section in (config.policy, config.value) if section is not None]
    if config.replay is not None or not any(_spans_run(section) for section in trained):
        return config
    recorded, steps = _find_recorded(config, mode), (max(1, num_steps), config.num_passes)
    policy = _set_steps(config.policy, *steps, None if recorded is None else recorded.policy)
    value = config.value
    if value is not None:
        value = _set_steps(value, *steps, None if recorded is None else recorded.value)
    return msgspec.structs.replace(config, policy=policy, value=value)


def _spans_run(section: ModelConfig) -> bool:
    return section.megatron_cfg.enabled or 0 < section.warmup_steps < 1


def _set_steps(section: Section, num_steps: int, num_passes: int, recorded: ModelConfig | None) -> Section:
    megatron = section.megatron_cfg
    warmup = compute_warmup_length(section.warmup_steps, num_steps, num_passes) if 0 < section.warmup_steps < 1 else 0
    if not megatron.enabled:
        if not warmup:
            return section
        scheduler = (SchedulerEntry(**make_linear_warmup(warmup)),) if recorded is None else recorded.scheduler
        return msgspec.structs.replace(section, scheduler=scheduler)
    schedule = megatron.scheduler
    if recorded is not None and not schedule.override_opt_param_scheduler:
        num_steps = recorded.megatron_cfg.train_iters or num_steps  # an earlier release recorded none
    if warmup:
        warmup = warmup if recorded is None else recorded.megatron_cfg.scheduler.lr_warmup_iters
        schedule = msgspec.structs.replace(schedule, lr_warmup_iters=warmup)
    megatron = msgspec.structs.replace(megatron, train_iters=num_steps, scheduler=schedule)
    return msgspec.structs.replace(section, megatron_cfg=megatron)


def _find_recorded(config: Config, mode: Mode) -> Config | None:
    """Return the configuration that a run to be resumed has had so far."""
    if mode != "resume" or not has_begun(config):
        return None
    with read_journal(Path(config.logger.log_dir)) as journal:
        return config_from_json(journal.config_json)


MakeAlgorithm = Callable[[Config, Tokenizer], RunningAlgorithm]
"""Loads the data of an algorithm."""


def preflight(
    source: str,
    config: Config,
    mode: Mode,
    *,
    has_rewards: bool = False,
    make: MakeAlgorithm = make_algorithm,
    load: Callable[[str], Config] = load_config,
) -> CheckedConfig:
    """Check a run, and the one before it if that will run, and load its data.

    `has_rewards` says whether a Python program scores samples with functions of its own. `make` makes the algorithm of
    the run, with its data. `load` returns the configuration of a prerequisite, by its path.

    Raises:
        TandemError: the problem; if there are several, a `ConfigError` that has them all.
    """
    with tempfile.TemporaryDirectory() as folder, gc_tuning.pause_collection():  # tokenizers and datasets import much
        ready, _ = _look_through(source, config, mode, Path(folder), (), make, load)
    if not has_rewards:
        _refuse_rewards_of_a_program(ready)
    return ready


def _refuse_rewards_of_a_program(ready: CheckedConfig | None) -> None:
    """Raise `ConfigError` for a run that needs the reward functions of a Python program."""
    while ready is not None:
        config = ready.config
        if config.generates and PYTHON_REWARDS in config.environments:
            names = ", ".join(config.env[PYTHON_REWARDS].kwargs.get("functions", ())) or "none here"
            raise ConfigError(
                f"{ready.source}: data.environment: {PYTHON_REWARDS}: the reward functions ({names}) are those of a "
                "Python program: run that, with tandem.train(..., resume=True) to continue"
            )
        ready = ready.prerequisite


def _look_through(
    source: str,
    config: Config,
    mode: Mode,
    scratch: Path,
    wanted_by: tuple[str, ...],
    make: MakeAlgorithm,
    load: Callable[[str], Config],
) -> tuple[CheckedConfig, Tokenizer]:
    make_importable(source)
    earlier: tuple[CheckedConfig, Tokenizer] | None = None
    if (path := config.prerequisite) is not None:
        if path in wanted_by:
            raise ConfigError(f"prerequisite: {' needs '.join([*wanted_by, path])}: a cycle")
        its_config = load(path)
        if has_begun(its_config) or needed_models.list_missing_models(config):
            (scratch / "earlier").mkdir()
            earlier = _look_through(
                path, its_config, mode, scratch / "earlier", (*wanted_by, path), make_algorithm, load
            )
    problems: list[TandemError] = []
    announced = [] if wanted_by else notices(config)  # the command prints these before anything is fetched
    with import_apart(config, scratch, config.cluster.deadlines.join_s) as own_code:
        looks: list[Callable[[Config], None]] = [_find_extras, _find_agent, refuse_threads, _find_folders]
        looks += [partial(_listen, mode=mode), *([_check_evaluation] if config.eval.during_training else [])]
        for look in looks:
            with _note_problems(problems):
                look(config)
        algorithm = None
        about_model: list[str] = []
        about_data: list[str] = []
        is_found = has_data = False
        with _note_problems(problems):
            config, about_model = needed_models.find_on_hub(config, mode, earlier[0].config if earlier else None)
            is_found = True
        with _note_problems(problems):  # whatever the models are
            config, about_data = find_data(config, mode)
            has_data = True
        if is_found:  # else the checks below would report it again
            with _note_problems(problems):
                about_model += _check_model(config, mode, earlier)
                if earlier is None:  # the earlier run makes the model otherwise
                    replayed_experts(config)
            with _note_problems(problems):
                check_value_model(config)
            with _note_problems(problems):
                check_reward_models(config, Path(earlier[0].config.checkpointing.checkpoint_dir) if earlier else None)
            with _note_problems(problems):
                config = inline_templates(config)
                tokenizer = _tokenizer(config, mode, scratch, earlier)
                about_model += about_data
                if has_data:
                    algorithm = make(config, tokenizer)
                about_model += check_teachers(config, tokenizer, may_be_made=earlier is not None)
        modules: dict[str, str] = {}
        with _note_problems(problems):
            modules = own_code()
    _complain(problems)
    assert algorithm is not None, "or there is a problem"
    late = [notice for notice in about_learning_rate(_fill_sizes(config, earlier)) if notice not in announced]
    ready = CheckedConfig(
        config=set_run_length(config, algorithm.num_steps, mode),
        source=source,
        algorithm=algorithm,
        notices=(
            *(f"note: {notice}" for notice in (*late, *about_model, descriptors.describe_low_limit()) if notice),
            *algorithm.notices,
        ),
        prerequisite=earlier[0] if earlier else None,
        modules=modules,
    )
    return ready, tokenizer


def _fill_sizes(config: Config, earlier: tuple[CheckedConfig, Tokenizer] | None) -> Config:
    """Return a configuration with the sizes of its model, even if a run before it makes the model."""
    before = earlier[0] if earlier else None
    while before is not None and read_model_config(config.policy) is None:
        source_policy = before.config.policy
        policy = msgspec.structs.replace(
            config.policy, model_name=source_policy.model_name, new_model=source_policy.new_model
        )
        config, before = msgspec.structs.replace(config, policy=policy), before.prerequisite
    return config


@contextlib.contextmanager
def _note_problems(problems: list[TandemError]) -> Iterator[None]:
    try:
        yield
    except TandemError as problem:
        problems.append(problem)
    except MemoryError:
        problems.append(DataError("data: there is not enough memory to load it"))


def _complain(problems: Sequence[TandemError]) -> None:
    """Raise the problems found, if any, as one error."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError(*(line for problem in problems for line in _lines(problem)))


def _lines(problem: TandemError) -> tuple[str, ...]:
    return problem.problems if isinstance(problem, ConfigError) else (str(problem),)


def _check_evaluation(config: Config) -> None:
    """Check that checkpoints can be evaluated during training."""
    from tandem.coordinator.preparing.evaluation_settings import check_during_training

    check_during_training(config)


def _find_extras(config: Config) -> None:
    """Check that packages which only some runs need are installed, where their processes start here."""
    missing = [
        f"logger.{package}_enabled: the package {package} is not installed; {install_command(package)}"
        for package in ("wandb", "mlflow")
        if getattr(config.logger, f"{package}_enabled") and find_package(package) is None
    ]
    watching = {
        "prometheus.port": (config.logger.prometheus.port, "prometheus_client", "prometheus-client", "prometheus"),
        "opentelemetry.endpoint": (
            *(config.logger.opentelemetry.endpoint, "opentelemetry.exporter.otlp.proto.http"),
            *("opentelemetry-exporter-otlp-proto-http", "opentelemetry"),
        ),
    }
    missing += [
        f"logger.{key}: the package {distribution} is not installed; {install_command(extra)}"
        for key, (setting, module, distribution, extra) in watching.items()
        if setting is not None and find_package(module) is None
    ]
    launched = launched_processes(config)
    judges = [name for name in config.environments if config.env[name].judge is not None]
    if launched.get("rollout") and judges and find_package("openai") is None:
        missing.append(f"env.{judges[0]}.judge: the package openai is not installed; {install_command('judge')}")
    kind = config.policy.generation.kind
    if launched.get("rollout") and kind.module and find_package(kind.module) is None:
        missing.append(
            f"policy.generation.backend: {kind.name}, but {kind.title} is not installed; {install_command(kind.extra)}"
        )
    if missing:
        raise ConfigError(*missing)


def _find_agent(config: Config) -> None:
    """Check that the agent's program exists, where engines start here."""
    agent = config.agent
    if agent is None or agent.command is None or not launched_processes(config).get("rollout"):
        return
    if shutil.which(agent.command[0], path=search_path()) is None:
        raise ConfigError(f"env.{config.data.environment}.command: there is no program {agent.command[0]!r}")


def _find_folders(config: Config) -> None:
    """Check that the run's folders can be written."""
    folders = {"logger.log_dir": config.logger.log_dir}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
    problems = []
    for key, name in folders.items():
        folder = Path(name).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not existing.is_dir():
            problems.append(f"{key}: {name!r} cannot be made: {str(existing)!r} is a file")
            continue
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".tandem-", dir=existing))
        except OSError as error:
            problems.append(f"{key}: {name!r} cannot be written: {str(existing)!r}: {error.strerror}")
    if problems:
        raise ConfigError(*problems)


def _listen(config: Config, mode: Mode) -> None:
    """Listen for a moment at all addresses of the run, at once.

    A resumed run may still see the page of the coordinator before, which ends by itself.
    """
    logger, problems = config.logger, list[TandemError]()
    with contextlib.ExitStack() as stack:
        with _note_problems(problems):
            stack.callback(wire.Hub(config.cluster.address, new_key_pair(), AdmittedKeys()).close)
        if mode != "resume" and logger.page != "auto":
            with _note_problems(problems):
                page = open_page_socket(logger.page)
                stack.callback(lambda: None if page is None else page.close())
        if mode != "resume" and find_package("prometheus_client") is not None:
            with _note_problems(problems):
                serve_prometheus(logger, stack)
    _complain(problems)


def _is_made_later(config: Config, mode: Mode, earlier: tuple[CheckedConfig, Tokenizer] | None) -> bool:
    """Return whether this run, or the one before it, makes its model's folder, perhaps in place of an existing one."""
    if not Path(config.policy.model_name).exists():
        return True
    is_changed = (earlier is not None and differences(earlier[0])) or needed_models.find_model_differences(config)
    return mode == "restart" and bool(is_changed)


def _check_model(config: Config, mode: Mode, earlier: tuple[CheckedConfig, Tokenizer] | None) -> list[str]:
    """Check the folder of a model that exists and stays; other checks report what is missing."""
    if _is_made_later(config, mode, earlier) or needed_models.find_model_problem(config) is not None:
        return []
    return check_model(config)


def _tokenizer(config: Config, mode: Mode, scratch: Path, earlier: tuple[CheckedConfig, Tokenizer] | None) -> Tokenizer:
    """Load the tokenizer, or the one that will be in the folder of a model that is yet to be made."""
    policy = config.policy
    folder, is_models_own = Path(policy.model_name), policy.tokenizer.name == policy.model_name
    if policy.new_model is not None:  # even if its folder exists
        check_new_model_type(policy.new_model.config)
    if earlier is not None and (not folder.exists() or (mode == "restart" and differences(earlier[0]))):
        earlier[1].save(model_folder := scratch / "model")
    elif (problem := needed_models.find_model_problem(config)) is not None:
        raise ModelError(problem)
    elif policy.new_model is not None and (
        not folder.exists() or (mode == "restart" and needed_models.find_model_differences(config))
    ):
        write_new_model(model_folder := scratch / "model", policy.new_model)
    else:
        model_folder, is_models_own = folder, False
    return load_tokenizer(config, model_folder if is_models_own else None)
