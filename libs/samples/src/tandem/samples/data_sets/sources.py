"""Sources of problems: reasoning-gym tasks, shuffled puzzles, files, Hugging Face datasets."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import itertools
import random
import string
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

import msgspec

from tandem.common.errors import ConfigError, DataError, ModelError, nearest
from tandem.common.files import first_irregular, irregular
from tandem.common.kept_inputs import path_of
from tandem.common.messages import Problem
from tandem.common.values import decode_object, encode_json, make_plain_object
from tandem.config.models.hub import (
    HubReference,
    convert_errors,
    explain_unreachable,
    remove_unfinished,
    use_only_the_cache,
)
from tandem.config.named import FILES, MULTIPLE_CHOICE, NAMED, find_place, is_local
from tandem.config.problem import MAX_SHOWN
from tandem.config.schema import DataConfig
from tandem.config.schema.environments import NEMO_GYM_ROWS
from tandem.samples.data_sets.float_columns import restore_decimals
from tandem.samples.data_sets.prompts import read_question, rewrite_user_text
from tandem.samples.data_sets.reasoning_tasks import task_dataset
from tandem.samples.data_sets.sliding_puzzle import make_shuffled, make_solved, render
from tandem.samples.markers import IMAGE_FIELDS

Row = Mapping[str, Any]
Rows = list[tuple[str, Row]]
"""Rows of a dataset, each with its place, for errors."""

_MAX_LINE = 1 << 24
"""Most bytes of a row: a file without line breaks may be no data at all, or gigabytes packed into a few."""
_MAX_DEPTH = 200
"""Deepest nesting of lists and objects: readers recurse at each level, and messages to engines add some."""
_MAX_LISTED = 20
"""Most fields of a row that an error lists."""

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_ABSENT = object()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPTIONS = "options"
_MESSAGES = "messages"
_CHUNK = 1000
_SEED_STRIDE = 1_000_000_007
"""reasoning-gym generates problem i of seed s from s + i: neighbouring seeds would share nearly all problems."""
_SEED_RANGE = 2**32 - 2**28
"""Some tasks seed numpy with 32 bits; the difference is room to count on from the first seed."""


def reasoning_gym(data: DataConfig, seed: int) -> Iterator[Problem]:
    """Yield problems of a reasoning-gym task without end; they may repeat.

    Raise `ConfigError` for an unknown task or parameter, naming the valid ones.
    """
    task = str(data.task)
    start = seed * _SEED_STRIDE % _SEED_RANGE
    for first in itertools.count(start, _CHUNK):
        dataset = task_dataset(task, data.task_params, size=_CHUNK, seed=first)
        for index, entry in enumerate(dataset):
            yield _read_entry(f"{task}-{first + index}", entry)


def reasoning_gym_problem(task: str, parameters: Mapping[str, Any], seed: int) -> Problem:
    """Return the problem of a reasoning-gym task that a seed gives. Raise `ConfigError` as `reasoning_gym` does."""
    return _read_entry(f"{task}-{seed}", task_dataset(task, parameters, size=1, seed=seed)[0])


def _read_entry(problem_id: str, entry: Mapping[str, Any]) -> Problem:
    return Problem(
        problem_id=problem_id,
        question=str(entry["question"]),
        # A problem with many right answers may show none; the scorer reads the metadata.
        answer=make_plain_object({"answer": entry["answer"]})["answer"],
        metadata=make_plain_object(entry["metadata"]),
    )


class _PuzzleParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``data.task_params`` for sliding puzzles."""

    size: Annotated[int, msgspec.Meta(ge=2, le=9)] = 3
    shuffle_moves: Annotated[int, msgspec.Meta(ge=1)] = 8


def sliding_puzzle(data: DataConfig, seed: int) -> Iterator[Problem]:
    """Yield boards without end, each up to ``shuffle_moves`` moves away from the solved one; they may repeat.

    The metadata has ``size``, ``board`` (see `tandem.samples.data_sets.sliding_puzzle`) and ``solution``, moves that
    solve it, not always the fewest. Raise `ConfigError` for a parameter that is unknown or out of bounds.
    """
    try:
        parameters = msgspec.convert(data.task_params, _PuzzleParameters)
    except msgspec.ValidationError as error:
        valid = ", ".join(_PuzzleParameters.__struct_fields__)
        raise ConfigError(f"data.task_params: {error} (parameters of sliding_puzzle are {valid})") from error
    generator = random.Random(seed)
    for index in itertools.count():
        num_moves = generator.randint(1, parameters.shuffle_moves)
        board, solution = make_shuffled(generator, parameters.size, num_moves)
        if board != make_solved(parameters.size):
            yield Problem(
                problem_id=f"sliding_puzzle-{seed}-{index}",
                question=render(board, parameters.size),
                answer="",
                metadata={"size": parameters.size, "board": list(board), "solution": solution},
            )


class RowReader:
    """The reader of the rows of data sets for a model of text, which refuses those with images."""

    is_text_only: ClassVar[bool] = True
    """Whether all that it reads is text, whose length tells how many tokens it has."""

    def read(
        self,
        data: DataConfig,
        *,
        text_key: str | None = None,
        only_held_out: bool = False,
        keeps_digits: bool = False,
    ) -> tuple[Rows, dict[str, Rows]]:
        """Read the files or splits of a dataset: those to train on, and those to validate on, by name.

        With `only_held_out`, training rows are not read where held-out rows have a source of their own. With
        `keeps_digits`, numbers of JSON files are `tandem.common.values.WrittenFloat` where needed. Raise
        `DataError` if reading fails.

        What a row has besides text is shown in the field `text_key`, or in conversations.
        """
        if data.dataset_name in NAMED and NAMED[data.dataset_name].has_images:
            raise DataError(f"data.dataset_name: {data.dataset_name} has images, but policy.model_name is a text model")
        train, apart = read_rows(data, only_held_out=only_held_out, keeps_digits=keeps_digits)
        for row_name, row in itertools.islice(itertools.chain(train, *apart.values()), 1):
            _refuse_images(row_name, row, data)
        return train, apart

    def draw_shapes(self, data: DataConfig, seed: int) -> Iterator[Problem]:
        """Refuse questions about pictures: raise `DataError`."""
        raise DataError("data.dataset_name: shapes are pictures, but policy.model_name is a text model")

    def keep(self) -> None:
        """Keep in the run's folder what texts refer to: nothing."""


def _refuse_images(row_name: str, row: Row, data: DataConfig) -> None:
    """Raise `DataError` for a row with an image, as bytes or as Hugging Face's data sets hold it."""
    for key in IMAGE_FIELDS if data.image_key is None else (data.image_key,):
        value = row.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if first is None:
            continue
        from tandem.samples.images.rows import StoredMedia  # most rows have none

        is_image = isinstance(first, bytes | StoredMedia) or (isinstance(first, Mapping) and "bytes" in first)
        if is_image or data.image_key is not None:
            raise DataError(f"{row_name} has an image in {key!r}, but policy.model_name is a text model")


def read_rows(data: DataConfig, *, only_held_out: bool, keeps_digits: bool) -> tuple[Rows, dict[str, Rows]]:
    """Read the rows of a dataset as they are."""
    name = data.dataset_name
    if is_local(name):
        apart = {name: file_rows(path, keeps_digits=keeps_digits) for name, path in validation_paths(data).items()}
        if only_held_out and apart:
            return [], apart
        return file_rows(str(data.train_data_path), keeps_digits=keeps_digits), apart
    path, split = find_place(name, data.split, data.train_data_path)
    if path.endswith(FILES):
        return file_rows(path, keeps_digits=keeps_digits), {}
    held_out = {} if data.val_split is None else {"": hub(path, data.val_split, data.subset, data.commit)}
    return [] if only_held_out and held_out else hub(path, split, data.subset, data.commit), held_out


def validation_paths(data: DataConfig) -> dict[str, str]:
    """Return the files to validate on, by name; a single file has the name ``""``."""
    return data.val_data_paths or ({} if data.val_data_path is None else {"": data.val_data_path})


def file_rows(path: str, *, keeps_digits: bool = False) -> Rows:
    """Read a file of problems: JSONL, unless its name ends in ``.csv`` or ``.parquet``. Raise `DataError`."""
    if path.endswith(".parquet"):
        return parquet(path)
    return csv_rows(path) if path.endswith(".csv") else jsonl(path, keeps_digits=keeps_digits)


def parquet(path: str) -> Rows:
    """Read a Parquet file. Raise `DataError` if that fails."""
    import pyarrow
    from pyarrow.parquet import read_table

    file_path = path_of(path)
    kind = irregular(file_path)
    if kind is not None:
        raise DataError(f"data: cannot read {path!r}: it is {kind}, not a Parquet file")
    try:
        table = read_table(file_path)
        read = restore_decimals(table.to_pylist(), table.schema)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"data: cannot read {path!r}: {_first_line(error)}") from error
    if not read:
        raise DataError(f"data: {path!r} holds no problem")
    return [(f"{path}:{number}", row) for number, row in enumerate(read, 1)]


def csv_rows(path: str) -> Rows:
    """Read a CSV file with column names in its first line; every field is text. Raise `DataError` naming the line."""
    file_path = path_of(path)
    kind = irregular(file_path)
    if kind is not None:
        raise DataError(f"data: cannot read {path!r}: it is {kind}, not a CSV file")
    named_rows: Rows = []
    try:
        with open(file_path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                row_name = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    fields = _list_names(reader.fieldnames or ())
                    raise DataError(f"{row_name} has not as many fields as the first line names: {fields}")
                named_rows.append((row_name, row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data: cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    if not named_rows:
        raise DataError(f"data: {path!r} holds no problem")
    return named_rows


def jsonl(path: str, *, keeps_digits: bool = False) -> Rows:
    """Read a file of one JSON object a line, which may be compressed (``.gz``). Raise `DataError` naming the line."""
    file_path = path_of(path)
    kind = irregular(file_path)
    if kind is not None:
        raise DataError(f"data: cannot read {path!r}: it is {kind}, not a file of one JSON object a line")
    decode = decode_object if keeps_digits else _decode_object
    try:
        with gzip.open(file_path) if path.endswith(".gz") else open(file_path, "rb") as file:
            lines = ((row_name, line) for row_name, line in _lines(path, file) if line.strip())
            named_rows: Rows = [(row_name, _json_object(row_name, line, decode)) for row_name, line in lines]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"data: cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    if not named_rows:
        raise DataError(f"data: {path!r} holds no problem")
    return named_rows


def hub(name: str, split: str, subset: str | None, commit: str | None = None) -> Rows:
    """Load a split of a dataset at a commit, by its name on the Hub, or of a folder of data files.

    If the Hub cannot be reached, use the copy of an earlier download of that commit. Raise a one-line `DataError` for
    any error of the library.
    """
    import datasets

    is_here = Path(name).exists()
    strange = first_irregular(itertools.chain([Path(name)], Path(name).rglob("*"))) if is_here else None
    if strange is not None:
        raise DataError(f"data.dataset_name: cannot load {name!r}: {strange}, not a data file")
    if not is_here:
        remove_unfinished(HubReference(name), "dataset")
    unreachable = "" if is_here else explain_unreachable()
    is_offline = bool(unreachable or datasets.config.HF_HUB_OFFLINE) and not is_here
    try:
        with use_only_the_cache() if unreachable else contextlib.nullcontext():
            if commit is not None and is_offline:
                loaded = _load_prepared(name, split, subset, commit)
            else:
                loaded = datasets.load_dataset(name, subset, split=split, revision=commit)
        from tandem.samples.images.rows import rows_of, stored_columns  # only datasets of the Hub hold files

        columns = stored_columns(loaded)
        read = rows_of(loaded, columns) if columns else loaded
        rows = restore_decimals(read, loaded.features.arrow_schema)
        named_rows: Rows = [(f"{name}[{split}]:{index}", row) for index, row in enumerate(rows)]
    except Exception as error:  # the library raises dozens of kinds, its own and the network's
        reason = (
            f"{unreachable}, and there is no copy here" if unreachable else _describe_load_error(error, name, commit)
        )
        raise DataError(f"data.dataset_name: cannot load {name!r}, split {split!r}: {reason}") from error
    if not named_rows:
        raise DataError(f"data.dataset_name: {name!r}, split {split!r}, holds no problem")
    return named_rows


def _load_prepared(name: str, split: str, subset: str | None, commit: str) -> Any:
    """Return a split of a commit that was loaded before, from the library's cache.

    The library, asked for a commit offline, returns the one that it prepared last. Its errors pass through.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    cache, short = Path(datasets.config.HF_DATASETS_CACHE), name.rpartition("/")[2]
    folder = "___".join([*name.split("/")[:-1], camelcase_to_snakecase(short)])
    builds = sorted(cache.glob(f"{folder}/*/*/{commit}"))
    names = [path.parent.parent.name for path in builds]
    matching = [
        path for path, each in zip(builds, names, strict=True) if each.partition("-")[0] == (subset or "default")
    ]
    if not matching and subset is None and len(builds) == 1:
        matching = builds
    if not matching:
        raise FileNotFoundError(f"commit {commit[:8]} is not in the cache of datasets ({cache})")
    version, configuration = matching[0].parent.name, matching[0].parent.parent.name
    builder = Cache(dataset_name=short, config_name=configuration, version=version, hash=commit, repo_id=name)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _describe_load_error(error: BaseException, name: str, commit: str | None) -> str:
    """Describe on one line why the library cannot load a dataset, or the error beneath that."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return f"{cause.strerror}: HF_HOME names another place for what is fetched"
        if isinstance(cause, HfHubHTTPError):
            try:
                with convert_errors(HubReference(name, commit), "dataset"):
                    raise cause
            except ModelError as plain:
                return str(plain)
        cause = cause.__cause__ or cause.__context__
    if type(error).__name__ == "DatasetNotFoundError" and "gated" in str(error):
        return f"{_first_line(error)} Accept its terms there, and set HF_TOKEN to a token of the account that did"
    return _first_line(error)


def problem(row_name: str, row: Row, data: DataConfig) -> Problem:
    """Read a row that holds a question and its answer, which keeps its type. Raise `DataError` if it lacks one."""
    if data.dataset_name == NEMO_GYM_ROWS:
        return _read_gym_row(row_name, row)
    row = _of_conversation(row, data)
    value = field(row_name, row, "input_key", data.input_key)
    if value is None:
        raise DataError(f"{row_name} has null in the field {data.input_key!r} (data.input_key)")
    question = read_question(f"{row_name}: {data.input_key!r} (data.input_key)", value)
    answer = field(row_name, row, "output_key", data.output_key)
    if data.processor == MULTIPLE_CHOICE:
        options = _options(row_name, row)
        question = rewrite_user_text(row_name, question, lambda text: f"Question: {text}\nOptions:\n{options}")
    named = NAMED.get(data.dataset_name)
    if named is not None and named.answer_after and isinstance(answer, str):
        answer = answer.rpartition(named.answer_after)[2].strip()
    metadata = {name: value for name, value in row.items() if name not in (data.input_key, data.output_key)}
    if not isinstance(question, str):  # templates write numbers as Transformers' do
        question = msgspec.json.decode(encode_json(question, str))
    return Problem(
        problem_id=row_name, question=question, **make_plain_object({"answer": answer, "metadata": metadata})
    )


def _read_gym_row(row_name: str, row: Row) -> Problem:
    """Read a row of NeMo Gym. Its agent gets it as it is; the question is what a reader is shown of it."""
    parameters = row.get("responses_create_params")
    question = parameters.get("input") if isinstance(parameters, Mapping) else None
    if isinstance(question, list | tuple):
        contents = [item.get("content") for item in question if isinstance(item, Mapping)]
        question = "\n".join(text for text in map(_read_item_text, contents) if text)
    if not isinstance(question, str):
        raise DataError(f"{row_name} has no responses_create_params.input: it is not a row of NeMo Gym")
    return Problem(
        problem_id=row_name, question=question, **make_plain_object({"answer": "", "metadata": {"row": row}})
    )


def _read_item_text(content: Any) -> str:
    """Return the text of an item's content."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return content if isinstance(content, str) else ""


def _of_conversation(row: Row, data: DataConfig) -> Row:
    """Return a row of NeMo-RL's ``messages`` as a question and its answer, which is what the assistant says last.

    So do rollouts in NeMo-RL read a file of conversations. Any other row is returned as it is.
    """
    messages = row.get(_MESSAGES)
    if data.environment is None or not isinstance(messages, list) or {data.input_key, data.output_key} & row.keys():
        return row
    last = messages[-1] if len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return row
    metadata = {name: value for name, value in row.items() if name != _MESSAGES}
    return {**metadata, data.input_key: messages[:-1], data.output_key: last.get("content")}


def _options(row_name: str, row: Row) -> str:
    """Return the choices of a question, a line each after its letter. Raise `DataError` if they are malformed."""
    options = field(row_name, row, "processor", _OPTIONS)
    if isinstance(options, list | tuple):
        options = dict(zip(string.ascii_uppercase, options, strict=False))
    if not isinstance(options, Mapping) or not options:
        raise DataError(f"{row_name}: {_OPTIONS!r} holds neither texts by letter nor a list of texts (data.processor)")
    return "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)


def field(row_name: str, row: Row, setting: str, key: str) -> Any:
    """Return a row's field `key`, the value of ``data.SETTING``. Raise `DataError` if there is no such field.

    A key ``a.0.b`` may also be the entry `b` of the first entry of the field `a`.
    """
    if key not in row:
        value: Any = row
        for part in key.split("."):
            if isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            return value
        raise DataError(
            f"{row_name} has no field {key!r} (data.{setting}); its fields are {_list_names(row)}{nearest(key, row)}"
        )
    return row[key]


def _list_names(keys: Iterable[str]) -> str:
    """List the names of fields on one line; names that are too many or too long are cut, unprintable ones escaped."""
    names = [key if key.isprintable() else repr(key) for key in itertools.islice(keys, _MAX_LISTED + 1)]
    names = [name if len(name) <= MAX_SHOWN else f"{name[: MAX_SHOWN - 3]}..." for name in names]
    return ", ".join(names if len(names) <= _MAX_LISTED else [*names[:_MAX_LISTED], "..."])


def _lines(path: str, file: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, each with its place; an endless line is not read to its end."""
    number = 0
    while chunk := file.readline(_MAX_LINE + 1):
        if len(chunk) > _MAX_LINE:
            raise DataError(f"{path}:{number + 1} is longer than {_MAX_LINE >> 20} MiB, the most that a row may have")
        for line in chunk.splitlines():
            number += 1
            yield f"{path}:{number}", line


def _json_object(row_name: str, line: bytes, decode: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    try:
        text = line.decode()
        row = decode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{row_name} is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
        ) from error
    except msgspec.MsgspecError as error:
        raise DataError(f"{row_name} is not a JSON object: {error}") from error
    except RecursionError:
        is_deep = True
    else:  # an exact count takes time, and few rows need it
        is_deep = line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _depth(row) > _MAX_DEPTH
    if is_deep:
        raise DataError(f"{row_name} is nested more than {_MAX_DEPTH} levels deep")
    return row


def _depth(value: object) -> int:
    """Return the deepest nesting of lists and objects."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [part for inner in level for part in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
