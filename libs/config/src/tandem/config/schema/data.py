"""Data sets and environments: where problems come from, and how they are scored."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.base import (
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from tandem.config.schema.reward_model import RewardModelKeys


class DataSet(Section, frozen=True, kw_only=True):
    """One of several data sets, as NeMo-RL v0.7 lists them. What it does not say is as in `data.default`, or as the key
    of the same name in `data` says."""

    dataset_name: NonEmptyStr | None = None
    """As `data.dataset_name`; ``ResponseDataset``, ``PreferenceDataset`` and ``BinaryPreferenceDataset`` are files."""
    data_path: NonEmptyStr | None = None
    """File of the problems (JSONL, CSV or Parquet), or the name of a data set on the Hub."""
    data_files: NonEmptyStr | None = None
    """Files of raw text, for distillation."""
    download_dir: NonEmptyStr | None = None
    """Accepted: where NeMo-RL puts what it downloads."""
    subset: NonEmptyStr | None = None
    """As `data.subset`."""
    revision: NonEmptyStr | None = None
    """New. As `data.revision`."""
    commit: NonEmptyStr | None = None
    """New. As `data.commit`."""
    split: NonEmptyStr | None = None
    """As `data.split`."""
    split_validation_size: NonNegativeFloat = 0.0
    """Problems to hold out of these: a share if it is less than 1, else a number."""
    seed: int | None = None
    """Accepted, like `data.seed`."""
    max_samples: PositiveInt | None = None
    """The first so many of its problems; null means all."""
    repeat: PositiveInt = 1
    """How often each problem is there."""
    weight: PositiveFloat | None = None
    """New. This set's share of the prompts of the run, beside the weights of the others, of which those that say none
    have 1; where no set says one, all are shuffled together, so that larger ones have a larger share."""
    env_name: NonEmptyStr | None = None
    """Which entry of `env` scores its samples; null is that of `data.environment`."""
    processor: NonEmptyStr | None = None
    """As `data.processor`."""
    prompt_file: NonEmptyStr | None = None
    """As `data.prompt_file`."""
    system_prompt_file: NonEmptyStr | None = None
    """As `data.system_prompt_file`."""
    input_key: NonEmptyStr | None = None
    """As `data.input_key`."""
    output_key: NonEmptyStr | None = None
    """As `data.output_key`."""
    chat_key: NonEmptyStr | None = None
    """As `data.chat_key`."""
    system_key: NonEmptyStr | None = None
    """As `data.system_key`."""
    prompt_key: NonEmptyStr | None = None
    """As `data.prompt_key`."""
    chosen_key: NonEmptyStr | None = None
    """As `data.chosen_key`."""
    rejected_key: NonEmptyStr | None = None
    """As `data.rejected_key`."""
    margin_key: NonEmptyStr | None = None
    """As `data.margin_key`."""
    text_key: NonEmptyStr | None = None
    """Field of raw text, for distillation."""
    characters_per_sample: PositiveInt | None = None
    """Characters that raw text is cut into."""

    @property
    def title(self) -> str:
        """What metrics call it."""
        name = Path(self.data_path).stem if self.data_path is not None else str(self.dataset_name)
        return re.sub(r"[^\w.-]+", "_", name)


def set_names(listed: Sequence[DataSet]) -> list[str]:
    """Return what metrics call the sets of a list, each by another name."""
    found: list[str] = []
    for each in listed:
        same = sum(name == each.title or name.startswith(f"{each.title}_") for name in found)
        found.append(f"{each.title}_{same + 1}" if same else each.title)
    return found


def name_apart(name: str, held_out: Container[str]) -> str:
    """Return what metrics call a set to validate on, beside what is held out of those to train on."""
    return f"{name}_validation" if name in held_out else name


OF_EACH_SET = (
    "dataset_name",
    "subset",
    "revision",
    "commit",
    "split",
    "processor",
    "prompt_file",
    "system_prompt_file",
    "input_key",
    "output_key",
    "chat_key",
    "system_key",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "margin_key",
)
"""Keys that a data set has by itself, and `data` for those that are not in a list."""


class Data(Section, frozen=True, kw_only=True):
    """The problems of the run, each a row of its own: several may have the same prompt. Training and validation never
    share one, with the same prompt, answer and other fields: files or splits that do are refused."""

    dataset_name: NonEmptyStr
    """``reasoning_gym`` (problems made by a task), ``sliding_puzzle`` (shuffled boards), ``jsonl`` (local files), the
    name of a dataset on the Hugging Face Hub, or one of NeMo-RL's: ``OpenMathInstruct-2`` and ``DeepScaler``
    (problems); for SFT ``squad``, ``openmathinstruct2``, ``prompt_response_dataset``, ``openai_format`` and
    ``open_assistant`` (local files); for DPO and RM ``HelpSteer3``, ``Tulu3Preference``, ``DPODataset`` and
    ``PreferenceDataset`` (local files)."""
    task: NonEmptyStr | None = None
    """New. The reasoning-gym task, such as ``chain_sum``."""
    task_params: dict[str, Any]
    """New. Parameters of that task; for sliding_puzzle `size` (of the square, 3) and `shuffle_moves` (most moves away
    from the goal, 8)."""
    num_train: PositiveInt | None = None
    """New. Training problems to make or to use; null means every one of the file or split, and 10000 where they are
    made. Those that are made, validation and all, are a million at most."""
    num_validation: NonNegativeInt | None = None
    """New. Validation problems to make, to use or to hold out; null means every one of `val_data_path` or
    `val_split`, and 256 where there is neither. 0: none, and nothing is validated."""
    seed: int | None = None
    """Accepted, because NeMo-RL draws what it holds out with it; here the prompts decide that, and the algorithm's seed
    the order."""
    train_data_path: NonEmptyStr | None = None
    """JSONL file of training problems; here and below, one that ends in ``.gz`` is compressed, and one that ends in
    ``.csv`` is CSV, whose first line names the fields."""
    val_data_path: NonEmptyStr | None = None
    """JSONL file of validation problems; null holds `num_validation` out of the training file."""
    val_data_paths: dict[str, NonEmptyStr] | None = None
    """SFT, DPO and RM: several such files in the place of one, by names of their own. Each is also evaluated by itself
    (`val_NAME/loss`), and `num_validation` and `val_batches` are of each."""
    input_key: NonEmptyStr
    """Field that holds the question."""
    output_key: NonEmptyStr
    """Field that holds the reference answer."""
    chat_key: NonEmptyStr | None
    """SFT: field that holds a whole conversation, a list of messages with `role` and `content`, of which those of the
    assistant are learned; null where a question and an answer are given."""
    system_key: NonEmptyStr | None = None
    """SFT: field that holds the system message of a conversation, if it is not among its messages."""
    prompt_key: NonEmptyStr = "prompt"
    """New. DPO and RM: field that holds the prompt, a text or a list of messages. Rows that have `context` and
    `completions`, as NeMo-RL's preference data, are read as such."""
    chosen_key: NonEmptyStr
    """New. DPO and RM: field that holds the better response, a text or a list of messages; a list may repeat the
    prompt, and where there is no prompt it must begin with it."""
    rejected_key: NonEmptyStr
    """New. DPO and RM: field that holds the worse response, like the better one."""
    margin_key: NonEmptyStr | None = None
    """New. Reward models: field that holds a number, by which the score of the better response should be ahead of the
    worse one's; its sign, which in HelpSteer3's ``overall_preference`` says which is better, is not read. Null: 0."""
    processor: NonEmptyStr | None = None
    """NeMo-RL's function that makes prompts of rows. Those for text are accepted, since the keys here say what a row
    is; with ``multichoice_qa_processor`` its field ``options``, texts by letter or in order, follows the question."""
    split: NonEmptyStr
    """Split of the Hub dataset to train on."""
    val_split: NonEmptyStr | None
    """New. Split of the Hub dataset to validate on; null holds `num_validation` out of `split`."""
    subset: NonEmptyStr | None
    """New. Configuration of the Hub dataset."""
    revision: NonEmptyStr | None = None
    """New. Branch, tag or commit of the Hub dataset; null is its default branch."""
    commit: NonEmptyStr | None = None
    """New. Commit that `revision` was when the run began. The run finds it and its journal keeps it, so that a run that
    is resumed or replayed reads the same rows."""
    prompt_template: str = "{question}"
    """New. What the user says to the model: ``{question}``, and any field of the problem's metadata, are filled in."""
    solution_template: str = "{answer}"
    """New. The worked solution that SFT trains on: ``{question}``, ``{answer}``, and any field of the problem's
    metadata, are filled in. Or a function that writes it, as ``module:function``;
    ``tandem.coordinator.data.worked`` has some. Such a function may also return the messages of a conversation, of
    which those of the assistant are learned."""
    train: tuple[DataSet, ...] = ()
    """Data sets to train on, one or a list, in the place of `dataset_name` and what belongs to it."""
    validation: tuple[DataSet, ...] = ()
    """Data sets to validate on, one or a list. Where there is none, so many are held out of those to train on as
    `split_validation_size` or `num_validation` says; null, where neither is given, means as in NeMo-RL that nothing is
    validated. Of several, each also has metrics of its own (``val_NAME/accuracy``), and `grpo.max_val_samples` and the
    like are of each."""
    default: DataSet | None = None
    """What each of these sets is like in what it does not say itself."""
    split_validation_size: NonNegativeFloat = 0.0
    """Problems to hold out, where nothing says how many: a share if it is less than 1, else a number."""
    shuffle: bool = True
    """Train on the problems in an order that the seed decides, another in each epoch; else in the order they have."""
    num_workers: NonNegativeInt | None = None
    """Accepted: processes that read data. They are read once, before the run begins."""
    use_multiple_dataloader: bool = False
    """Draw from the sets of `train` in turns, so many prompts of each as `num_prompts_per_dataloader` says, in the
    place of weights."""
    num_prompts_per_dataloader: PositiveInt | None = None
    """Prompts of one data set before the next has its turn; a step's are a multiple of it."""
    custom_dataloader: NonEmptyStr | None = None
    """With `use_multiple_dataloader`: dotted path of a function that says which set each prompt of a step is drawn
    from, such as ``mine.choose``: ``choose(step, sizes, num_prompts)`` returns so many names, where `sizes` has the
    problems of each set by its name. It must depend on nothing else: a resumed run asks again. NeMo-RL's
    ``example_custom_dataloader`` is the turns that there are without it."""
    rejected_template: str | None = None
    """New. DPO and RM, where problems are made: the worse solution, like `solution_template`, which writes the better
    one. A function may return a list of texts: each makes a pair, all of them beside one another in the data set."""
    prompt_file: NonEmptyStr | None = None
    """Text file whose ``{}`` is replaced by the prompt; relative to the working directory."""
    system_prompt_file: NonEmptyStr | None = None
    """Text file with the system message; relative to the working directory."""
    system_prompt: NonEmptyStr | None = None
    """The system message itself."""
    max_input_seq_length: PositiveInt
    """Longest prompt, in tokens."""
    environment: NonEmptyStr | None
    """New. Which entry of `env` scores the samples of data sets that do not say so themselves (`env_name`)."""
    add_bos: bool = True
    """SFT, DPO and RM: begin each sequence with the tokenizer's beginning-of-sequence token, if it has one."""
    add_eos: bool = True
    """SFT, DPO and RM: end each solution with the tokenizer's end-of-sequence token."""
    add_generation_prompt: bool = False
    """SFT, DPO and RM: put the chat template's generation prompt before the solution."""
    add_system_prompt: bool = False
    """SFT, DPO and RM: let the chat template add its default system message."""

    @property
    def chooser(self) -> str | None:
        """The dotted path of the function that chooses between data sets, if one does."""
        path = self.custom_dataloader if self.use_multiple_dataloader else None
        return None if path is None or path.endswith(".example_custom_dataloader") else path

    @property
    def validation_names(self) -> tuple[str, ...]:
        """What metrics call the sets that are validated on by themselves; none where there is one."""
        if not self.train:
            return tuple(self.val_data_paths or ())
        own = set_names(self.train)
        first_too = bool(self.num_validation) and not self.validation
        held_out = [
            name
            for index, (name, each) in enumerate(zip(own, self.train, strict=True))
            if each.split_validation_size or (first_too and not index)
        ]
        for name in set_names(self.validation):
            held_out.append(name_apart(name, held_out))
        return tuple(held_out) if len(held_out) > 1 else ()

    @property
    def train_sets(self) -> tuple[Data, ...]:
        """A section for each listed data set to train on, as though it were alone; the first is what some are held out
        of where nothing says which."""
        first, *others = (self.of_set(each) for each in self.train)
        if not self.validation and not self.train[0].split_validation_size:
            first = msgspec.structs.replace(first, num_validation=self.num_validation)
        if not others:
            first = msgspec.structs.replace(first, num_train=self.num_train)
        return (first, *others)

    def of_set(self, each: DataSet) -> Data:
        """Return the section for one listed data set, as though it were alone, and all of it trained on."""
        own = {key: getattr(each, key) for key in OF_EACH_SET}
        return msgspec.structs.replace(
            self,
            **own,
            environment=each.env_name or self.environment,
            train_data_path=each.data_path,
            val_data_path=None,
            val_split=None,
            num_train=None,
            num_validation=None,
            split_validation_size=each.split_validation_size,
            train=(),
            validation=(),
        )


class Judge(Section, frozen=True, kw_only=True):
    """A language model that scores responses: it is shown question and response, and its answer has the score."""

    base_url: NonEmptyStr | None = None
    """New. OpenAI-compatible endpoint that is asked, such as ``https://HOST/v1``; null asks the rollout's own engine,
    which has the newest weights of the run: set `policy.generation.expose_http_server` for that."""
    model: NonEmptyStr | None = None
    """New. What the endpoint calls the model; required with `base_url`."""
    api_key_env: NonEmptyStr | None = None
    """New. Environment variable of the rollout processes that has the endpoint's key; null: it wants none."""
    system_prompt: NonEmptyStr | None = None
    """New. Said to the judge before all else."""
    prompt: NonEmptyStr = (
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse to grade:\n{response}\n\n"
        "How good is the response, from 0 (wrong) to 10 (right)? End with a line 'Score: N'."
    )
    """New. What the judge is asked: ``{question}``, ``{answer}`` (the reference), ``{response}``, and any field of the
    problem's metadata, are filled in."""
    score_pattern: NonEmptyStr = r"(?i)score\W*\s(-?\d+(?:\.\d+)?)"
    """New. Regular expression whose first group is the score; the last match in the judge's answer counts."""
    lowest_score: float = 0.0
    """New. The score that is worth a reward of 0."""
    highest_score: float = 10.0
    """New. The score that is worth a reward of 1; scores beyond either are taken for it."""
    correct_from: float = 1.0
    """New. The reward from which on a response counts as solved, for the accuracy."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    """New. Of the judge's answer."""
    max_tokens: PositiveInt = 512
    """New. Of the judge's answer."""
    extra_body: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Further fields of each request, such as ``{chat_template_kwargs: {enable_thinking: false}}``."""
    max_concurrency: PositiveInt = 16
    """New. Requests that each rollout process has going at once."""
    timeout_s: PositiveFloat = 60.0
    """New. Seconds that one request may take before it is asked again; the environment's `timeout_s` is not less than
    all of them together."""
    max_retries: Annotated[int, Meta(ge=0, le=20)] = 4
    """New. How often one judgement is asked for again, after longer and longer pauses or those that the endpoint asks
    for, where it cannot be reached, is busy or fails."""
    cache: NonEmptyStr | None = None
    """New. SQLite file of judgements, made if it is not there: a request that is the same, or on its way, is not made
    again. Relative to the working directory; several rollouts, and several runs, may share one on a local disk."""
    dollars_per_million_prompt_tokens: NonNegativeFloat = 0.0
    """New. The endpoint's price, for the metric `spent/judge_dollars`."""
    dollars_per_million_completion_tokens: NonNegativeFloat = 0.0
    """New. Likewise, of what the judge says."""

    @property
    def longest_s(self) -> float:
        """Seconds that a judgement takes at most, with all its requests and the pauses between them."""
        return (self.max_retries + 1) * self.timeout_s + self.max_retries * _LONGEST_PAUSE_S


_LONGEST_PAUSE_S = 60.0
"""That the client makes if the endpoint asks for one."""


class Environment(RewardModelKeys, frozen=True, kw_only=True):
    """One way to score samples. Built in are ``reasoning_gym``, ``math`` (math-verify), ``math_multi_reward`` (several
    rewards a sample) and ``exact_match``, and two that answer the policy: ``calculator`` and ``sliding_puzzle_game``.
    Any other name needs a `class`, or is an agent: a program outside that plays episodes, which `command` starts or
    `url` asks, or a `judge`, or a reward model (``reward_model``, or whatever has a `model_name`). ``python_rewards``
    are the functions given to `tandem.train`; its `num_workers` are threads of that program."""

    num_workers: PositiveInt = 1
    """Worker processes of each rollout process, or threads where the class says `runs_in = "threads"`: so many samples
    are scored at once, and more where the class is asynchronous. NeMo-RL's base files say 8."""
    timeout_s: PositiveFloat = 10.0
    """New. Seconds that one score, or one answer to a response, may take; a worker process that takes longer is killed,
    with all that it has started, and replaced. Of an agent: that an episode may take."""
    on_error: Literal["zero", "drop", "fail"] | None = None
    """New. What becomes of a sample whose response the environment raised an exception on, took longer than `timeout_s`
    for, or returned no valid reward for. zero: the response is worth nothing, and is not correct. drop: the sample is
    not trained on and counts nowhere. fail: the run ends. null: zero in built-in environments, but for a problem that
    itself cannot be scored; fail in others, and for functions given to `tandem.train`."""
    max_failures: NonNegativeInt | None = None
    """New. How many such samples one rollout process may have before the run ends after all; null: any number."""
    class_path: NonEmptyStr | None = msgspec.field(name="class", default=None)
    """New. Dotted path of the environment's class, such as ``mine.Judge`` for the class ``Judge`` of a ``mine.py``
    beside the configuration file; null takes the built-in one of that name."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of the class."""
    cfg: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings in the shape NeMo-RL's environments have them, handed to the class as its argument `cfg` if there are
    any. What NeMo-RL's files say of environments that are not built (``nemo_gym``, ``vlm`` and the like) is gathered
    here."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """Of math: how an answer is compared with the right one. hf_math_verify: as expressions, by the library
    math-verify. dapo_math_verify: what follows the last ``Answer:`` of a response, as text, as DAPO's data want it
    (arXiv:2503.14476, section 4.1)."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """Of math: what an answer is. english_multichoice: the letter after the last ``Answer:``. multilingual_multichoice:
    the same in the languages of MMLU's translations."""
    reward_functions: tuple[dict[str, Any], ...] = ()
    """Of NeMo-RL's environments for pictures and sounds: functions, with a `name` and a `weight` each."""
    command: tuple[NonEmptyStr, ...] | None = None
    """New. Program, and its arguments, that plays one episode against the rollout's OpenAI-compatible endpoint
    (``docs/agents.md``), in the working directory of the run; it is started once an episode."""
    persistent: bool = False
    """New. Whether `command` stays: `num_workers` of it in each rollout process, which read the episodes to play from
    their standard input, a line each, until that ends."""
    url: NonEmptyStr | None = None
    """New. Server that is asked to play an episode, in the place of a `command`: ``http://HOST:PORT/PATH``."""
    max_concurrency: PositiveInt = 16
    """New. Episodes of an agent that each rollout process has going at once."""
    max_completions: Annotated[int, Meta(ge=1, le=4096)] = 64
    """New. Responses that one episode of an agent may ask for."""
    judge: Judge | None = None
    """New. A language model scores the responses."""

    @property
    def longest_call_s(self) -> float:
        """Seconds after which a call of it counts as stuck."""
        return self.timeout_s if self.judge is None else max(self.timeout_s, self.judge.longest_s)

    @property
    def is_agent(self) -> bool:
        """Whether it is a program outside that plays episodes."""
        return self.command is not None or self.url is not None

    @property
    def is_reward_model(self) -> bool:
        """Whether a sequence classifier scores the responses."""
        return self.model_name is not None and not self.is_own and self.judge is None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own, and not built in."""
        return self.class_path is not None or self.is_agent
