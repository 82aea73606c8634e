"""Where problems come from and how they are scored."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.common.config.schema.base import NonEmptyStr, PositiveFloat, PositiveInt, Section


class Data(Section, frozen=True, kw_only=True):
    """The problems of the run. Training and validation never share one."""

    dataset_name: NonEmptyStr
    """``reasoning_gym`` (problems made by a task), ``sliding_puzzle`` (shuffled boards), ``jsonl`` (local files), or
    the name of a dataset on the Hugging Face Hub."""
    task: NonEmptyStr | None = None
    """New. The reasoning-gym task, such as ``chain_sum``."""
    task_params: dict[str, Any]
    """New. Parameters of that task; for sliding_puzzle `size` (of the square, 3) and `shuffle_moves` (most moves away
    from the goal, 8)."""
    num_train: PositiveInt | None = None
    """New. Training problems to make or to use; null means every one of the file or split, and 10000 where they are
    made."""
    num_validation: PositiveInt | None = None
    """New. Validation problems to make, to use or to hold out; null means every one of `val_data_path` or
    `val_split`, and 256 where there is neither."""
    train_data_path: NonEmptyStr | None = None
    """New. JSONL file of training problems."""
    val_data_path: NonEmptyStr | None = None
    """New. JSONL file of validation problems; null holds `num_validation` out of the training file."""
    input_key: NonEmptyStr = "input"
    """New. Field that holds the question."""
    output_key: NonEmptyStr = "output"
    """New. Field that holds the reference answer."""
    split: NonEmptyStr = "train"
    """New. Split of the Hub dataset to train on."""
    val_split: NonEmptyStr | None = None
    """New. Split of the Hub dataset to validate on; null holds `num_validation` out of `split`."""
    subset: NonEmptyStr | None = None
    """New. Configuration of the Hub dataset."""
    prompt_template: str = "{question}"
    """New. What the user says to the model: ``{question}``, and any field of the problem's metadata, are filled in."""
    solution_template: str = "{answer}"
    """New. The worked solution that SFT trains on: ``{question}``, ``{answer}``, and any field of the problem's
    metadata, are filled in. Or a function that writes it, as ``module:function``;
    ``tandem.coordinator.data.worked`` has some. Such a function may also return the messages of a conversation, of
    which those of the assistant are learned."""
    prompt_file: NonEmptyStr | None = None
    """Text file whose ``{}`` is replaced by the prompt; relative to the working directory."""
    system_prompt_file: NonEmptyStr | None = None
    """Text file with the system message; relative to the working directory."""
    max_input_seq_length: PositiveInt
    """Longest prompt, in tokens."""
    environment: NonEmptyStr | None
    """New. Which entry of `env` scores the samples."""
    add_bos: bool = True
    """SFT: begin each sequence with the tokenizer's beginning-of-sequence token, if it has one."""
    add_eos: bool = True
    """SFT: end each solution with the tokenizer's end-of-sequence token."""
    add_generation_prompt: bool = False
    """SFT: put the chat template's generation prompt before the solution."""
    add_system_prompt: bool = False
    """SFT: let the chat template add its default system message."""


class Environment(Section, frozen=True, kw_only=True):
    """One way to score samples. Built in are ``reasoning_gym``, ``math`` (math-verify) and ``exact_match``, and two
    that answer the policy: ``calculator`` and ``sliding_puzzle_game``. Any other name needs a `class`."""

    num_workers: PositiveInt = 1
    """Samples scored at once by one rollout process. NeMo-RL's base files say 8."""
    timeout_s: PositiveFloat = 10.0
    """New. Seconds that one score, or one answer to a response, may take."""
    class_path: NonEmptyStr | None = msgspec.field(name="class", default=None)
    """New. Dotted path of the environment's class, such as ``mine.Judge`` for the class ``Judge`` of a ``mine.py``
    beside the configuration file; null takes the built-in one of that name."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of the class."""
    cfg: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings in the shape NeMo-RL's environments have them, handed to the class as its argument `cfg` if there are
    any."""
