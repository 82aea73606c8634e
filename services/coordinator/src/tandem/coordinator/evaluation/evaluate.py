"""``coordinator eval``: runs without steps that validate the models it names, with real processes.

A run begins with the model's weights, brings them to the engines as any run does, generates its validation samples, and
ends. One fork server forks the processes of all runs, one run after another.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import CheckpointError, DataError, ModelError, RunFolderError, nearest
from tandem.common.values import question_text, text_of
from tandem.config import Config
from tandem.config.models import hub
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.loop.opening import CommandInvocation
from tandem.coordinator.loop.run import run
from tandem.coordinator.model_folders import model_vocabulary, read_json, refuse_unknown_type
from tandem.coordinator.preparing.evaluation_settings import choose_seed, evaluation_config, read_sampling
from tandem.coordinator.preparing.preflight import preflight
from tandem.coordinator.preparing.prerequisite import CheckedConfig
from tandem.coordinator.scheduler.events import FinishRun
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.preparing.beginning import set_aside
from tandem.observe import evaluation
from tandem.observe.run_folder.found_models import Which, models_in
from tandem.observe.run_folder.journal_file import hold_folder, list_runs_in
from tandem.samples.media import read_texts
from tandem.samples.model_files import load_tokenizer

RUNS = "runs"
"""Folder of the runs within the results: their journals, and the logs of their processes."""
Say = Callable[[str], None]
_CONFIG = "config.json"


class EvaluatedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model to evaluate."""

    label: str
    """Name as the user gave it."""
    name: str
    """Name of its files among the results."""
    folder: Path


def find_models(words: Sequence[str], which: Which) -> list[EvaluatedModel]:
    """Return the models that words of the command line name, each once. Raise `ModelError` if one is not found."""
    models: dict[Path, EvaluatedModel] = {}
    for label, folder in _locate_models(words, which):
        _check_kind(folder)
        if folder.resolve() not in models:
            name = _file_name(label, {model.name for model in models.values()})
            models[folder.resolve()] = EvaluatedModel(label=str(label), name=name, folder=folder)
    return [*models.values()]


def _expand(word: str) -> list[Path]:
    """Return the paths that a word stands for; a pattern may match several."""
    path = Path(word)
    if path.exists():
        return [path]
    if glob.has_magic(word) and (paths := sorted(glob.glob(word), key=_split_numbers)):
        return [Path(each) for each in paths]
    if hub.parse_reference(word) is not None:
        return [path]  # a name on the Hub
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ModelError(f"--model {word}: there is no such folder{nearest(path.name, beside)}")


def _locate_models(words: Sequence[str], which: Which) -> Iterator[tuple[Path, Path]]:
    """Yield the named models: each with its label and the folder of its files."""
    for path in itertools.chain.from_iterable(map(_expand, words)):
        try:
            yield from ((model.label, model.folder) for model in models_in(path, which))
        except (ModelError, RunFolderError, CheckpointError) as error:
            raise ModelError(f"--model {error}") from error


def _check_kind(folder: Path) -> None:
    """Raise `ModelError` for a model of a type that Transformers does not know."""
    try:
        refuse_unknown_type(folder, read_json(folder / _CONFIG))
    except ModelError as error:
        raise ModelError(f"--model {error}") from error


def _file_name(label: Path, used_names: set[str]) -> str:
    """Return a name for files that no other model has."""
    name = re.sub(r"[^\w.-]+", "-", str(label)).strip("-.") or "model"
    return next(
        each for each in (name, *(f"{name}.{i}" for i in range(2, len(used_names) + 3))) if each not in used_names
    )


def _split_numbers(path: str) -> list[int | str]:
    """Return a sort key that puts ``step_9`` before ``step_10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def prepare(source: str, base: Config, models: Sequence[EvaluatedModel], folder: Path) -> list[CheckedConfig]:
    """Check all evaluations before one begins. Raise `TandemError` if one cannot be run."""
    configs = []
    for model in models:
        ready = preflight(source, evaluation_config(base, model.folder, folder / RUNS / model.name), "new")
        _check_vocabulary(ready, model)
        configs.append(ready)
    return configs


def prepare_folder(folder: Path, say: Say) -> None:
    """Make the folder of the results; set earlier results aside. Raise `RunFolderError` if it cannot be used."""
    if folder.exists():
        if not folder.is_dir():
            raise RunFolderError(f"eval.save_path: {str(folder)!r} is a file")
        if any(folder.iterdir()):
            if not (folder / RUNS).is_dir():
                raise RunFolderError(f"eval.save_path: {str(folder)!r} holds something else; choose another folder")
            with contextlib.ExitStack() as stack:
                for run in list_runs_in(folder / RUNS):  # not those of an evaluation in progress
                    stack.enter_context(hold_folder(run))
                set_aside(folder, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"eval.save_path: cannot make {str(folder)!r}: {error.strerror}") from error


def evaluate(
    base: Config,
    models: Sequence[EvaluatedModel],
    readies: Sequence[CheckedConfig],
    folder: Path,
    say: Say,
    fork_server: ServiceForkServer,
) -> tuple[FinishRun, evaluation.EvaluationResults | None]:
    """Evaluate models one after another; return how the last run ended, and the results of finished ones.

    The results of a model are on disk before the next one begins.
    """
    rows = []
    summary: evaluation.EvaluationResults | None = None
    finish = FinishRun(outcome="finished")
    for number, (model, ready) in enumerate(zip(models, readies, strict=True), 1):
        say(f"evaluating {model.label} ({number} of {len(models)})")
        finish = run(CommandInvocation(ready=ready, mode="new", say=say, fork_server=fork_server))
        if finish.outcome != "finished":
            break
        algorithm = _algorithm(ready)
        results = evaluation.results_of(_list_problems(ready, algorithm), algorithm.validated)
        rows.append(evaluation.scores_of(model.label, results, algorithm.validated, base.eval.k_value))
        summary = _describe(ready, base, rows)
        try:
            evaluation.write_results(folder / f"{model.name}.parquet", results)
            evaluation.write_table(folder, summary)
        except OSError as error:
            raise RunFolderError(f"cannot write results to {folder}: {error.strerror}") from error
    return finish, summary


def _describe(ready: CheckedConfig, base: Config, rows: Sequence[Any]) -> evaluation.EvaluationResults:
    config, sampling = ready.config, read_sampling(base)
    return evaluation.EvaluationResults(
        source=ready.source,
        dataset_name=config.data.dataset_name,
        environment=", ".join(config.environments),
        num_tests_per_prompt=config.rollout_section.num_val_generations_per_prompt,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        max_new_tokens=sampling["max_new_tokens"],
        seed=choose_seed(base),
        metric=base.eval.metric.replace("k", str(base.eval.k_value)),
        interval=evaluation.INTERVAL,
        models=[*rows],
    )


def _algorithm(ready: CheckedConfig) -> GrpoAlgorithm:
    assert isinstance(ready.algorithm, GrpoAlgorithm), "what rolls out, and takes no step"
    return ready.algorithm


def _check_vocabulary(ready: CheckedConfig, model: EvaluatedModel) -> None:
    """Raise `DataError` if the tokenizer turns a prompt into tokens that the model does not have."""
    size, algorithm = model_vocabulary(model.folder), _algorithm(ready)
    groups = algorithm.prompt_groups(0, "validate", range(algorithm.num_validation))
    highest = max(max(group.prompt_ids) for group in groups)
    if size is not None and highest >= size:
        raise DataError(
            f"--model {model.label}: the tokenizer {ready.config.policy.tokenizer.name!r} does not fit the model: it "
            f"makes token {highest} of a prompt, and the model has {size} (policy.tokenizer.name)"
        )


def _list_problems(ready: CheckedConfig, algorithm: GrpoAlgorithm) -> list[evaluation.EvaluatedProblem]:
    tokenizer = load_tokenizer(ready.config)
    texts = read_texts(tokenizer, ready.config)
    groups = algorithm.prompt_groups(0, "validate", range(algorithm.num_validation))
    return [
        evaluation.EvaluatedProblem(
            problem_id=group.problem.problem_id,
            question=question_text(group.problem.question),
            prompt=tokenizer.decode(group.prompt_ids, skip_special_tokens=False)
            if texts is None
            else texts.text_of(group.prompt_ids, [each.digest for each in group.media or ()], group.media or ()),
            reference=text_of(group.problem.answer),
        )
        for group in groups
    ]
