"""Named data sets, most of them NeMo-RL's: their contents and origins."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import msgspec

from tandem.config.schema.environments import NEMO_GYM_ROWS

Holds = Literal["problems", "conversations", "preferences", "texts"]
"""Contents of a data set: questions with answers, whole conversations, prompts with a better and a worse response, or
raw texts."""


class NamedDataset(msgspec.Struct, frozen=True, kw_only=True):
    """A data set known by name."""

    holds: Holds
    path: str = ""
    """Name on the Hub; empty for the user's own files."""
    keys: MappingProxyType[str, str] = MappingProxyType({})
    """Defaults of keys in the section ``data``."""
    answer_after: str = ""
    """Marker after which the reference answer begins within its field; empty if it is the whole field."""
    has_images: bool = False
    """Whether its questions are about images; `tandem.samples.data_sets.pictured` reads its rows."""
    splits: MappingProxyType[str, tuple[str, str]] = MappingProxyType({})
    """Repositories on the Hub, each with its split, by NeMo-RL's name of a split; empty if all are splits of `path`."""
    held_out: str = ""
    """The split to validate on, if nothing else is said."""


def _make_named(holds: Holds, path: str = "", **keys: str) -> NamedDataset:
    return NamedDataset(holds=holds, path=path, keys=MappingProxyType(keys))


def _make_pictured(held_out: str, **splits: tuple[str, str]) -> NamedDataset:
    return NamedDataset(
        holds="problems",
        path=next(iter(splits.values()))[0],
        keys=MappingProxyType({"input_key": "problem", "output_key": "answer"}),
        has_images=True,
        splits=MappingProxyType(splits),
        held_out=held_out,
    )


def _list_of_one(path: str, *names: str, **splits_by_name: str) -> dict[str, tuple[str, str]]:
    return {name: (path, name) for name in names} | {name: (path, split) for name, split in splits_by_name.items()}


_CLEVR_TRAIN = ("MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "train")
_CLEVR = _make_pictured(
    "valA",
    train=_CLEVR_TRAIN,
    trainA=_CLEVR_TRAIN,
    valA=("MMInstruction/Clevr_CoGenT_ValA", "train"),
    valB=("MMInstruction/Clevr_CoGenT_ValB", "train"),
)

_OPEN_MATH = _make_named(
    "problems", "nvidia/OpenMathInstruct-2", split="train_1M", input_key="problem", output_key="expected_answer"
)

_DAPO = {"input_key": "prompt.0.content", "output_key": "reward_model.ground_truth"}

NAMED = {
    "jsonl": _make_named("problems"),
    "prompt_response_dataset": _make_named("problems"),
    "ResponseDataset": _make_named("problems"),
    NEMO_GYM_ROWS: _make_named("problems"),
    "OpenMathInstruct-2": _OPEN_MATH,
    "openmathinstruct2": _OPEN_MATH,
    "DeepScaler": _make_named(
        "problems", "agentica-org/DeepScaleR-Preview-Dataset", input_key="problem", output_key="answer"
    ),
    "DAPOMath17K": _make_named("problems", "BytedTsinghua-SIA/DAPO-Math-17k", **_DAPO),
    "DAPOMathAIME2024": _make_named("problems", "BytedTsinghua-SIA/AIME-2024", **_DAPO),
    "AIME2024": _make_named("problems", "HuggingFaceH4/aime_2024", input_key="problem", output_key="answer"),
    "gsm8k": NamedDataset(
        holds="problems",
        path="openai/gsm8k",
        keys=MappingProxyType({"subset": "main", "input_key": "question", "output_key": "answer"}),
        answer_after="####",
    ),
    "clevr-cogent": _CLEVR,
    "clevr_cogent": _CLEVR,
    "geometry3k": _make_pictured("validation", **_list_of_one("hiyouga/geometry3k", "train", "validation", "test")),
    "refcoco": _make_pictured("validation", **_list_of_one("jxu124/refcoco", "train", "validation", default="train")),
    "tulu3_sft_mixture": _make_named("conversations", "allenai/tulu-3-sft-mixture", chat_key="messages"),
    "open_assistant": _make_named("conversations"),
    "openai_format": _make_named("conversations", chat_key="messages"),
    "squad": _make_named("conversations", "rajpurkar/squad", val_split="validation"),
    "arrow_text": _make_named("texts", text_key="text"),
    "DPODataset": _make_named("preferences", chosen_key="chosen_response", rejected_key="rejected_response"),
    "PreferenceDataset": _make_named("preferences"),
    "BinaryPreferenceDataset": _make_named("preferences"),
    "HelpSteer3": _make_named("preferences", "nvidia/HelpSteer3", subset="preference", val_split="validation"),
    "Tulu3Preference": _make_named("preferences", "allenai/llama-3.1-tulu-3-8b-preference-mixture"),
}
"""Named data sets, by ``data.dataset_name``. NeMo-RL downloads the trees of Open Assistant; here they are a local
file. It validates DeepScaler on AIME 2024; here some of DeepScaler's own problems are held out."""

GENERATED = {"reasoning_gym": "reasoning_gym", "sliding_puzzle": "sliding_puzzle_game", "shapes": "exact_match"}
"""Data sets with generated problems, and the environment that scores each."""

DEFAULT_FIELDS = {
    "split": "train",
    "input_key": "input",
    "output_key": "output",
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}
"""Values of keys of ``data`` where neither the user nor the name of the data set says them."""

RAW_TEXT = "kd_data_processor"
"""NeMo-RL's ``processor`` for raw texts."""

MULTIPLE_CHOICE = "multichoice_qa_processor"
"""NeMo-RL's ``processor`` for multiple-choice questions."""

FILES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
"""Suffixes of problem files."""

TEXT_FILES = (".arrow", *FILES, ".txt")
"""Suffixes of files of raw text."""

HUB_FILES = "hf://datasets/"
"""Beginning of the path of files on the Hub."""


def find_place(dataset_name: str, split: str | None, instead: str | None) -> tuple[str, str]:
    """Return where a data set is: its name on the Hub or its folder, and the split there.

    `instead` is a copy that the user has of a data set that is known by name.
    """
    named = NAMED.get(dataset_name)
    path, source_split = (dataset_name if named is None else named.path), split or "train"
    if named is not None and named.splits:
        path, source_split = named.splits.get(source_split, (path, source_split))
        path = instead or path
    return path, source_split


def holds_texts(dataset_name: str) -> bool:
    """Tell whether a data set is raw text."""
    named = NAMED.get(dataset_name)
    return named is not None and named.holds == "texts"


def is_local(dataset_name: str) -> bool:
    """Tell whether a data set is read from ``data.train_data_path``."""
    named = NAMED.get(dataset_name)
    return named is not None and not named.path
