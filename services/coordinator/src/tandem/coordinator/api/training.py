"""``tandem.train``: begin a run; functions of the program score its samples.

A model and a tokenizer that a program has in memory are saved as a folder of the run, which is named after the content
of its files. Resuming the run with another model is thus noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.errors import ConfigError, ModelError, RunFolderError
from tandem.common.user_code import shown
from tandem.config import Config, config_to_json
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.coordinator.api import configuration
from tandem.coordinator.api.callbacks import Callback, ProgressLine, check_callbacks
from tandem.coordinator.api.handle import Run
from tandem.coordinator.api.process import Mode, RunOrder, RunProcess
from tandem.coordinator.api.reward_server import ProgramRewardServer
from tandem.coordinator.api.rewards import RewardFunction, check_columns, reward_functions
from tandem.coordinator.preparing.resuming import refuse_changes
from tandem.observe.run_folder.checkpoints import config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tandem.samples.data_sets.split import share_held_out
from tandem.samples.unchanged_files import use_older_names

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


FOLDER = "models"
"""Folder of the models within the run folder."""
_CHUNK = 1 << 24


class SavedObjects(msgspec.Struct, frozen=True):
    """Model and tokenizer files beside the run folder, to be moved into it."""

    temporary: Path
    folder: Path
    """Final folder of the files."""
    settings: dict[str, Any]
    """Configuration that names the final folder."""

    def keep(self) -> None:
        """Move the files into the run folder, unless they are already there."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if not self.folder.exists():
            self.temporary.rename(self.folder)


def check_objects(model: object, tokenizer: object) -> None:
    """Raise `ConfigError` for arguments that Transformers cannot save as a model or a tokenizer."""
    for value, argument, kind in (
        (model, "model", "transformers.PreTrainedModel"),
        (tokenizer, "tokenizer", "transformers.PreTrainedTokenizerBase"),
    ):
        if value is not None and not any(base.__name__ == kind.rpartition(".")[2] for base in type(value).__mro__):
            raise ConfigError(
                f"{argument}: expected a {kind}, got {shown(value)[:200]}; the name of a folder, or of a model on the "
                "Hub, is policy.model_name of the configuration"
            )


def make_placeholders(model: object, tokenizer: object) -> dict[str, Any]:
    """Return the configuration with placeholders for the saved objects, to find out where the run folder is."""
    return _settings(model, tokenizer, "-")


@contextlib.contextmanager
def save_objects(model: Any, tokenizer: Any, run_folder: Path) -> Iterator[SavedObjects | None]:
    """Save a model, a tokenizer or both beside the run folder; files that are not kept are deleted at the end."""
    if model is None and tokenizer is None:
        yield None
        return
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run_folder.parent, prefix=".model-") as beside:
        files = Path(beside) / "files"
        for value, argument in ((model, "model"), (tokenizer, "tokenizer")):
            try:
                if value is not None:
                    value.save_pretrained(files)
                    use_older_names(files)
            except Exception as error:
                raise ModelError(f"{argument}: cannot be saved: {type(error).__name__}: {error}") from error
        folder = run_folder / FOLDER / f"policy-{_digest(files)}"
        yield SavedObjects(temporary=files, folder=folder, settings=_settings(model, tokenizer, str(folder)))


def _settings(model: object, tokenizer: object, folder: str) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if model is not None:
        policy |= {"model_name": folder, "new_model": None}
    if tokenizer is not None:
        policy |= {"tokenizer": {"name": folder}}
    return {"policy": policy} if policy else {}


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:12]


def train(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
    solved_at: float = 1.0,
    dataset: Sequence[Mapping[str, Any]] | datasets.Dataset | str | Path | None = None,
    validation_dataset: Sequence[Mapping[str, Any]] | datasets.Dataset | str | Path | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    callbacks: Sequence[Callback] | None = None,
    progress: bool = True,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    restart: bool = False,
    from_step: int | None = None,
    show: bool = False,
    wait: bool = False,
) -> Run:
    """Begin a run, and return its handle while it goes on.

    The run is a process of its own, with all the others below it: this may be called in a notebook, in any thread, and
    several times. When this program is killed, its runs are killed too. A program that reaches its end waits for its
    runs; Ctrl-C or an error makes them save and end.

    Args:
        config: Path of a YAML file, a dictionary of the same content, or a `Config`.
        rewards: One function, or several, that score samples. They run in this process, in threads of their own.
            Without any, the configuration's environment scores. The signature is either
            ``f(prompt, response, **columns) -> float`` or, with the parameters of TRL's ``reward_funcs``,
            ``f(prompts, completions, **columns) -> list[float]``; ``async def`` works as well. Columns are those of
            the data's row. A function gets the columns that it names, and all of them if it has ``**columns``.
            A result of None is left out of the reward.
        reward_weights: A number for each function; the reward is the weighted sum. By default all are one.
        solved_at: Lowest value of the first function at which a sample counts as solved, for the accuracy.
        dataset: Rows to train on in place of the configuration's data: a list of dictionaries, a ``datasets.Dataset``,
            or the path of a JSON-lines file. The prompt is in the column `data.input_key`, or else ``prompt``,
            ``question``, ``input`` or ``problem``. The reference answer, if there is one, is in `data.output_key`, or
            else ``answer``, ``solution``, ``output``, ``reference`` or ``ground_truth``. The rows are copied into the
            run folder.
        validation_dataset: Rows to validate on, in the same form. Without them `data.num_validation` rows of `dataset`
            are held out: by default a tenth, 256 at most.
        model: A model to train in place of `policy.model_name`. It is saved once in the run folder, and not changed.
        tokenizer: Its tokenizer, in place of `policy.tokenizer.name`, saved in the same way.
        callbacks: Objects with methods that are called, in this process, at the start, at the end, and after each step
            and validation.
        progress: Show a line about the newest step on stderr, unless `show` is set.
        overrides: Settings over those of `config`: ``{"grpo.max_num_steps": 20}``.
        resume: Continue the run that is in the run folder. `dataset` may be left out; `rewards` may not.
        restart: Set an earlier run in the run folder aside, and begin anew.
        from_step: With `resume`: go on from the checkpoint of this step, and do later ones again.
        show: Print the run's console output, which is also in ``logs/console.log`` of the run folder.
        wait: Return when the run has ended, and raise its error if it failed.

    Returns:
        The handle of the run, after its checks: problems that are known before it starts are raised here.

    Raises:
        ConfigError: the configuration or an argument is invalid.
        DataError: the data cannot be used.
        ModelError: the model cannot be loaded or saved.
        RunFolderError: the run folder already holds a run; or, with `resume`, none, or one that differs.
    """
    mode = _mode(resume=resume, restart=restart, from_step=from_step)
    settings = configuration.settings_of(config, overrides)
    observers = (*check_callbacks(callbacks), *([ProgressLine()] if progress and not show else []))
    check_objects(model, tokenizer)
    functions = None if rewards is None else reward_functions(rewards, reward_weights)
    if functions is None and reward_weights is not None:
        raise ConfigError("reward_weights: there are no rewards to weigh")
    if validation_dataset is not None and dataset is None:
        raise ConfigError("validation_dataset: give dataset as well")
    of_functions = {} if functions is None else configuration.of_rewards(functions, solved_at)
    with _save_objects(settings, model, tokenizer, mode) as (settings, objects):
        final, files = _add_data(settings, of_functions, dataset, validation_dataset, mode)
        if functions is not None:
            _refuse_what_rewards_cannot_score(final)
            if files:
                check_columns(functions, next(iter(files.values())).columns)
        _refuse_folder(final, mode)
        for path, rows in files.items():
            rows.write(path)
        if objects is not None:
            objects.keep()
    run = _begin(_source(config), final, functions, mode, from_step, show=show)
    if observers:
        run._observe(observers)
    return run.wait() if wait else run


@contextlib.contextmanager
def _save_objects(
    settings: configuration.ConfigurationBuilder, model: object, tokenizer: object, mode: Mode
) -> Iterator[tuple[configuration.ConfigurationBuilder, SavedObjects | None]]:
    """Save a model and a tokenizer, and yield the settings that name their folder."""
    if model is None and tokenizer is None:
        yield settings, None
        return
    # To find the run folder; rewards and data do not matter yet.
    first = settings.apply_argument(make_placeholders(model, tokenizer))
    config = first.built(configuration.of_rewards((), 1.0), {**configuration.make_placeholder_rows()})
    if mode == "new":
        _refuse_folder(config, mode)  # before gigabytes are written
    with save_objects(model, tokenizer, Path(config.logger.log_dir)) as objects:
        assert objects is not None
        yield settings.apply_argument(objects.settings), objects


def _mode(*, resume: bool, restart: bool, from_step: int | None) -> Mode:
    if resume and restart:
        raise ConfigError("resume, restart: a run either goes on or begins anew")
    if from_step is not None and not resume:
        raise ConfigError("from_step: says where to resume: give resume=True as well")
    return "resume" if resume else "restart" if restart else "new"


def _source(config: object) -> str:
    """Return the path that the configuration was read from; the user's modules are found beside it."""
    return str(config) if isinstance(config, str | Path) else str(Path.cwd() / "tandem.train")


def _add_data(
    settings: configuration.ConfigurationBuilder,
    of_functions: Mapping[str, Any],
    dataset: object,
    validation: object,
    mode: Mode,
) -> tuple[Config, dict[Path, configuration.CheckedRows]]:
    """Return the configuration, and the rows to write to the files that it names."""
    if dataset is None and mode != "resume":
        return settings.built(of_functions), {}
    # To find the run folder and the configured columns; rewards do not matter yet.
    first = settings.built(of_functions or configuration.of_rewards((), 1.0), configuration.make_placeholder_rows())
    folder = Path(first.logger.log_dir)
    earlier = _rows_of_run(folder, has_rewards=bool(of_functions)) if mode == "resume" else None
    says_how_many = settings.says_what_is_held_out
    if dataset is None:
        if earlier is None:
            return settings.built(of_functions), {}
        train_path, validation_path, num_before = earlier
        return settings.built(
            of_functions, configuration.of_rows(train_path, validation_path, None if says_how_many else num_before)
        ), {}
    train = configuration.rows_of(dataset, first.data, "dataset")
    files = {train.path(folder, "train"): train}
    if validation is not None:
        held_out = configuration.rows_of(validation, first.data, "validation_dataset")
        files[held_out.path(folder, "validation")] = held_out
    paths = (*map(str, files), None)[:2]
    for path, before, name in zip(paths, (earlier or paths)[:2], ("dataset", "validation_dataset"), strict=True):
        if path != before:
            raise RunFolderError(f"cannot resume {folder}: {name} is not the one that the run began with")
    num_held_out = None
    if not says_how_many and validation is None:
        num_held_out = share_held_out(train.num_rows) if earlier is None else earlier[2]
    return settings.built(of_functions, configuration.of_rows(paths[0], paths[1], num_held_out)), files


def _rows_of_run(folder: Path, *, has_rewards: bool) -> tuple[str | None, str | None, int | None] | None:
    """Return the files of rows, to train and to validate on, of the run in a folder; None if it has none.

    The third value is the number of training rows that are held out.

    Raise `ConfigError` if functions score its samples, and none are given now.
    """
    if not (folder / JOURNAL_NAME).exists():
        return None
    with read_journal(folder) as journal:
        config = config_of(journal)
    data = config.data
    if config.generates and data.environment == PYTHON_REWARDS and not has_rewards:
        names = ", ".join(config.env[PYTHON_REWARDS].kwargs["functions"])
        raise ConfigError(f"rewards: functions of a program ({names}) score the samples of {folder}: give them again")
    if data.input_key != configuration.QUESTION:
        return None
    return data.train_data_path, data.val_data_path, data.num_validation


def _refuse_what_rewards_cannot_score(config: Config) -> None:
    if not config.declaration.rolls_out:
        raise ConfigError(f"rewards: {config.algorithm} has no samples to score")
    if config.data.environment != PYTHON_REWARDS:
        raise ConfigError(f"rewards: overrides choose data.environment {config.data.environment!r} to score samples")


def _refuse_folder(config: Config, mode: Mode) -> None:
    """Raise `RunFolderError` if the run can neither begin in its run folder nor continue there."""
    folder = Path(config.logger.log_dir)
    has_begun = (folder / JOURNAL_NAME).exists()
    if mode == "new" and has_begun:
        raise RunFolderError(
            f"{folder} already holds a run: continue it with resume=True, set it aside with restart=True, or choose "
            "another logger.log_dir"
        )
    if mode == "resume" and (has_begun or config.prerequisite is None):
        with read_journal(folder) as journal:
            refuse_changes(journal, config)


def _begin(
    source: str,
    config: Config,
    functions: Sequence[RewardFunction] | None,
    mode: Mode,
    from_step: int | None,
    *,
    show: bool,
) -> Run:
    """Start the run, and wait until it was checked."""
    server = None if functions is None else ProgramRewardServer(functions, config)
    order = RunOrder(
        source=source,
        config_json=config_to_json(config),
        mode=mode,
        from_step=from_step,
        reward_server=None if server is None else server.at,
    )
    folder = Path(config.logger.log_dir).absolute()
    process = RunProcess(order, folder, show=show, at_end=lambda: None if server is None else server.close())
    run = Run(Path(config.logger.log_dir), process)
    try:
        process.has_begun.wait()
    except KeyboardInterrupt:
        run.kill()
        raise
    if run.error is not None:
        raise run.error
    return run
