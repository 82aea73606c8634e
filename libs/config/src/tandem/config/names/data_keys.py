"""Keys of ``data``, and which rows each is read for: a key that a run does not read has a notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from tandem.common.errors import nearest
from tandem.config.models.model_sizes import read_model_config
from tandem.config.models.vision_families import family_of
from tandem.config.named import (
    DEFAULT_FIELDS,
    GENERATED,
    HUB_FILES,
    MULTIPLE_CHOICE,
    NAMED,
    TEXT_FILES,
    holds_texts,
    is_local,
)
from tandem.config.problem import describe_without_effect
from tandem.config.schema import Config, DataConfig
from tandem.config.schema.data import OF_EACH_SET
from tandem.config.schema.packaged import NEMO_GYM_ROWS, PACKAGED

RowKind = Literal["generated", "problems", "conversations", "preferences", "texts"]
"""The form of a data set's items. Generated problems have no rows."""
_OWN_FORM = ("squad", "open_assistant", "HelpSteer3", NEMO_GYM_ROWS)
"""Data sets whose fields have names of their own."""


class DataView(msgspec.Struct, frozen=True):
    """One data set of a run, as if it were the only one."""

    config: Config
    data: DataConfig
    key: str
    """Where it is configured."""

    @property
    def name(self) -> str:
        """The data set's name."""
        return self.data.dataset_name

    @property
    def kind(self) -> RowKind:
        """The form of its items."""
        if self.name in GENERATED or self.name in PACKAGED:
            return "generated"
        if holds_texts(self.name):
            return "texts"
        if self.config.declaration.learns_preferences:
            return "preferences"
        is_conversation = self.name in _OWN_FORM or self.data.chat_key is not None
        return "conversations" if is_conversation and not self.config.declaration.rolls_out else "problems"

    @property
    def has_fields(self) -> bool:
        """Whether the names of its fields may differ."""
        return self.name not in _OWN_FORM and self.kind != "generated"


class DataKey(msgspec.Struct, frozen=True):
    """Keys of ``data`` that only some runs read."""

    names: tuple[str, ...]
    is_read: Callable[[DataView], bool]
    reason: str
    """Why another run does not read them."""


def _of_kinds(*kinds: RowKind) -> Callable[[DataView], bool]:
    return lambda view: view.kind in kinds and view.has_fields


def _is_supervised(view: DataView) -> bool:
    return not view.config.declaration.rolls_out


DATA_KEYS = (
    DataKey(("input_key", "output_key"), _of_kinds("problems"), "only rows with a question and an answer have them"),
    DataKey(
        ("chat_key",),
        lambda view: _is_supervised(view) and view.kind == "conversations" and view.name not in _OWN_FORM,
        "only SFT and off-policy distillation read conversations by it",
    ),
    DataKey(
        ("system_key",),
        lambda view: view.kind == "conversations" and view.name != "squad",
        "only conversations of SFT and off-policy distillation are read by it",
    ),
    DataKey(
        ("tool_key",),
        lambda view: view.kind in ("conversations", "preferences") and view.name not in ("squad", "HelpSteer3"),
        "only conversations of SFT, and preferences, have tools",
    ),
    DataKey(("prompt_key", "chosen_key", "rejected_key"), _of_kinds("preferences"), "only rows of pairs have them"),
    DataKey(("text_key", "characters_per_sample"), _of_kinds("texts"), "only arrow_text is raw text"),
    DataKey(("image_key",), _of_kinds("problems", "conversations", "preferences"), "only rows have images"),
    DataKey(("max_image_pixels",), lambda view: _may_see(view.config), "policy.model_name is a text model"),
    DataKey(("task_params",), lambda view: view.name in GENERATED, "only problems that are generated have parameters"),
    DataKey(
        ("train_data_path",),
        lambda view: is_local(view.name) or holds_texts(view.name) or _has_copies(view),
        "data.dataset_name decides, and only that of a file, such as jsonl, reads one",
    ),
    DataKey(
        ("val_data_path",),
        lambda view: is_local(view.name),
        "data.dataset_name decides, and only that of a file, such as jsonl, reads one",
    ),
    DataKey(
        ("val_split", "subset", "revision", "split"),
        lambda view: view.kind != "generated" and not _is_of_files(view),
        "only data sets on the Hub have it",
    ),
    # Tasks have both for runs of all algorithms, of which some write no solutions.
    DataKey(
        ("solution_template", "prompt_template", "prompt_file"),
        lambda view: view.kind in ("problems", "generated"),
        "the rows have whole prompts and responses",
    ),
    DataKey(
        ("rejected_template",),
        lambda view: view.kind == "generated" and view.config.declaration.learns_preferences,
        "only DPO and reward models have it, of problems that are generated",
    ),
    DataKey(
        ("system_prompt", "system_prompt_file"), lambda view: view.kind != "texts", "raw text has no system message"
    ),
    DataKey(
        ("add_eos", "add_generation_prompt"),
        _is_supervised,
        "the chat template and the policy write the turns of rollouts",
    ),
    DataKey(
        ("num_prompts_per_dataloader",),
        lambda view: view.config.data.use_multiple_dataloader,
        "data.use_multiple_dataloader is false",
    ),
    DataKey(
        ("custom_dataloader",),
        lambda view: view.config.data.use_multiple_dataloader or view.data.takes_turns_by_example,
        "data.use_multiple_dataloader is false",
    ),
    DataKey(("download_dir",), lambda view: view.name == "refcoco", "rows are read from where datasets keeps them"),
)
"""Keys of ``data`` that not all runs read, but those that are refused, and those of `tandem.config.moot_keys`."""
PROCESSORS = (
    "default",
    "helpsteer3_data_processor",
    "kd_data_processor",
    "math_data_processor",
    "math_gdpo_data_processor",
    "math_hf_data_processor",
    "multichoice_qa_processor",
    "nemo_gym_data_processor",
    "sft_processor",
    "vlm_hf_data_processor",
)
"""NeMo-RL v0.7's values of ``processor``. What they do follows from the data set and from other keys."""


def _may_see(config: Config) -> bool:
    """Tell whether the model sees, or is not on this machine."""
    return read_model_config(config.policy) is None or family_of(config.policy) is not None


def _is_of_files(view: DataView) -> bool:
    """Tell whether rows are read from files, here or below ``hf://``."""
    place = str(view.data.train_data_path)
    return place.endswith(TEXT_FILES) or place.startswith(HUB_FILES) if view.kind == "texts" else is_local(view.name)


def _has_copies(view: DataView) -> bool:
    """Tell whether the user may have a copy of a data set that is known by name."""
    named = NAMED.get(view.name)
    return named is not None and bool(named.splits)


_OF_EACH_SET = {name: name for name in OF_EACH_SET} | {"train_data_path": "data_path"}
"""Keys of a listed data set, by those of ``data``."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(DataConfig)}


def _default(name: str, dataset_name: str) -> Any:
    """Return the value of a key that is not set."""
    named = NAMED.get(dataset_name)
    if named is not None and name in named.keys:
        return named.keys[name]
    plain = _DEFAULTS[name]
    return DEFAULT_FIELDS.get(name) if plain is msgspec.NODEFAULT else plain


def notice_data_keys(config: Config) -> Iterator[str]:
    """Yield the keys of ``data``, and of the sets that it lists, that this run does not read."""
    data = config.data
    listed = [
        DataView(config, data.of_set(each), f"data.{side}[{index}]")
        for side, sets in (("train", data.train), ("validation", data.validation))
        for index, each in enumerate(sets)
    ]
    section_view = [DataView(config, data, "data")]
    for row in DATA_KEYS:
        for name in row.names:
            is_of_sets = bool(listed) and name in _OF_EACH_SET
            for view in listed if is_of_sets else section_view:
                value = getattr(view.data, name)
                if value not in (None, {}) and value != _default(name, view.name) and not row.is_read(view):
                    key = _OF_EACH_SET[name] if is_of_sets else name
                    yield describe_without_effect(f"{view.key}.{key}", value, row.reason)
    for view in listed or section_view:
        processor = view.data.processor
        if processor is not None and processor not in PROCESSORS:
            reason = (
                f"it is none of NeMo-RL's functions, and other keys describe the rows{nearest(processor, PROCESSORS)}"
            )
            yield describe_without_effect(f"{view.key}.processor", processor, reason)
        elif processor == MULTIPLE_CHOICE and view.kind != "problems":
            reason = "only rows with a question have choices"
            yield describe_without_effect(f"{view.key}.processor", processor, reason)
