"""Data sets and environments: the sources of problems, and their scoring."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.base import (
    ConfigSection,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from tandem.config.schema.environments import (
    HarborConfig,
    NemoGymConfig,
    OpenEnvConfig,
    PackagedConfig,
    RewardModelKeys,
    VerifiersConfig,
)


class DataSet(ConfigSection, frozen=True, kw_only=True):
    """One of several data sets, as in NeMo-RL v0.7. Unset keys are taken from `data.default`, or else from the key
    of the same name in `data`."""

    dataset_name: NonEmptyStr | None = None
    """Same as `data.dataset_name`; ``ResponseDataset``, ``PreferenceDataset`` and ``BinaryPreferenceDataset`` are
    files."""
    data_path: NonEmptyStr | None = None
    """File of the problems (JSONL, CSV or Parquet), or the name of a data set on the Hub. Of ``clevr-cogent``,
    ``geometry3k`` and ``refcoco``, a copy to read: a folder of its data files, or a file."""
    data_files: NonEmptyStr | None = None
    """Files of raw text (``arrow_text``): a path, also below ``hf://datasets/``, which may have wildcards. Or the name
    of a data set on the Hub. Files end in ``.arrow``, ``.parquet``, ``.jsonl``, ``.json`` (an object a line), ``.csv``
    or ``.txt`` (a text a line)."""
    download_dir: NonEmptyStr | None = None
    """Same as `data.download_dir`."""
    subset: NonEmptyStr | None = None
    """Same as `data.subset`."""
    revision: NonEmptyStr | None = None
    """New. Same as `data.revision`."""
    commit: NonEmptyStr | None = None
    """New. Same as `data.commit`."""
    split: NonEmptyStr | None = None
    """Same as `data.split`."""
    split_validation_size: NonNegativeFloat = 0.0
    """Problems to hold out of this set: a fraction if less than 1, else a number."""
    seed: int | None = None
    """Accepted, like `data.seed`."""
    max_samples: PositiveInt | None = None
    """Number of problems to use, from the front; null means all."""
    repeat: PositiveInt = 1
    """Copies of each problem."""
    weight: PositiveFloat | None = None
    """New. Relative share of this set in the run's prompts; 1 where other sets have a weight and this one does not.
    If no set has one, all are shuffled together, so that larger sets have larger shares."""
    env_name: NonEmptyStr | None = None
    """Entry of `env` that scores its samples; null means `data.environment`."""
    processor: NonEmptyStr | None = None
    """Same as `data.processor`."""
    prompt_file: NonEmptyStr | None = None
    """Same as `data.prompt_file`."""
    system_prompt_file: NonEmptyStr | None = None
    """Same as `data.system_prompt_file`."""
    input_key: NonEmptyStr | None = None
    """Same as `data.input_key`."""
    output_key: NonEmptyStr | None = None
    """Same as `data.output_key`."""
    chat_key: NonEmptyStr | None = None
    """Same as `data.chat_key`."""
    system_key: NonEmptyStr | None = None
    """Same as `data.system_key`."""
    tool_key: NonEmptyStr | None = None
    """Same as `data.tool_key`."""
    prompt_key: NonEmptyStr | None = None
    """Same as `data.prompt_key`."""
    chosen_key: NonEmptyStr | None = None
    """Same as `data.chosen_key`."""
    rejected_key: NonEmptyStr | None = None
    """Same as `data.rejected_key`."""
    margin_key: NonEmptyStr | None = None
    """Same as `data.margin_key`."""
    text_key: NonEmptyStr | None = None
    """Same as `data.text_key`."""
    characters_per_sample: PositiveInt | None = None
    """Same as `data.characters_per_sample`."""

    @cached_property
    def title(self) -> str:
        """Name in metrics."""
        name = Path(self.data_path).stem if self.data_path is not None else str(self.dataset_name)
        return re.sub(r"[^\w.-]+", "_", name)


def set_names(listed: Sequence[DataSet]) -> list[str]:
    """Return distinct names, for metrics, of the data sets in a list."""
    names: list[str] = []
    for data_set in listed:
        same = sum(name == data_set.title or name.startswith(f"{data_set.title}_") for name in names)
        names.append(f"{data_set.title}_{same + 1}" if same else data_set.title)
    return names


def make_name_apart(name: str, held_out: Container[str]) -> str:
    """Return the name, for metrics, of a validation set beside those held out of training sets."""
    return f"{name}_validation" if name in held_out else name


OF_EACH_SET = (
    "dataset_name",
    "subset",
    "revision",
    "commit",
    "split",
    "download_dir",
    "processor",
    "prompt_file",
    "system_prompt_file",
    "input_key",
    "output_key",
    "chat_key",
    "system_key",
    "tool_key",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "margin_key",
    "text_key",
    "characters_per_sample",
)
"""Keys of a data set in a list, which `data` has for a single one."""


class DataConfig(ConfigSection, frozen=True, kw_only=True):
    """The problems of the run. Each row is a problem, and several may have the same prompt. Training and validation
    never share a problem with the same prompt, answer and other fields: files or splits that do are refused."""

    dataset_name: NonEmptyStr
    """``reasoning_gym`` (problems generated by a task), ``sliding_puzzle`` (shuffled boards), ``shapes`` (pictures, for
    a vision model), ``jsonl`` (local files), the name of a dataset on the Hugging Face Hub, or one of NeMo-RL's.
    Those are ``OpenMathInstruct-2`` and ``DeepScaler`` (problems); with images ``clevr-cogent``, ``geometry3k`` and
    ``refcoco`` (problems); for SFT ``squad``, ``openmathinstruct2``,
    ``prompt_response_dataset``, ``openai_format`` and ``open_assistant`` (local files); for off-policy distillation
    ``arrow_text`` (raw text); for DPO and RM
    ``HelpSteer3``, ``Tulu3Preference``, ``DPODataset`` and ``PreferenceDataset`` (local files). Null, or left out,
    means ``jsonl`` where `train_data_path` or a file to validate on is given."""
    task: NonEmptyStr | None = None
    """New. The reasoning-gym task, such as ``chain_sum``."""
    task_params: dict[str, Any]
    """New. Parameters of the task; for sliding_puzzle `size` (of the square, 3) and `shuffle_moves` (most moves away
    from the goal, 8); for shapes `size` (pixels across, 32), `max_shapes` (4) and `blank` (show nothing, false)."""
    num_train: PositiveInt | None = None
    """New. Training problems to generate or use; null means all of the file or split, and 10000 generated ones. At
    most a million are generated, validation included."""
    num_validation: NonNegativeInt | None = None
    """New. Validation problems to generate, use or hold out. Null means all of `val_data_path` or `val_split`, or of
    `validation`; without any, a tenth of the training problems, and 256 at most. 0 means no validation."""
    seed: int | None = None
    """Accepted: NeMo-RL's seed for held-out problems. Here the prompts decide what is held out, and the algorithm's
    seed the order."""
    train_data_path: NonEmptyStr | None = None
    """JSONL file of training problems. Here and below, a file that ends in ``.gz`` is compressed, and one that ends
    in ``.csv`` is CSV with the fields in its first line."""
    val_data_path: NonEmptyStr | None = None
    """JSONL file of validation problems; null holds `num_validation` out of the training file."""
    val_data_paths: dict[str, NonEmptyStr] | None = None
    """SFT, DPO and RM: several such files instead of one, by name. Each also has metrics of its own
    (`val_NAME/loss`), and `num_validation` and `val_batches` apply to each."""
    input_key: NonEmptyStr
    """Field with the question: a text, or a list of messages that the response answers. Templates are filled with the
    last of the user's messages. Rollouts also read rows with a conversation in ``messages``, of which the assistant's
    last message is the answer."""
    output_key: NonEmptyStr
    """Field with the reference answer, which keeps its type and its digits. Any of a list is right, null means none;
    SFT learns the first of a list."""
    chat_key: NonEmptyStr | None
    """SFT: field with a whole conversation, a list of messages with `role` and `content`, of which the assistant's
    are learned; null for a question and an answer."""
    system_key: NonEmptyStr | None = None
    """SFT: field with the system message of a conversation, if it is not among its messages."""
    tool_key: NonEmptyStr | None = None
    """Field with the tools that the chat template shows for a row, a list of JSON schemas or its JSON text; with null,
    a field `tools` is read if it holds one."""
    image_key: NonEmptyStr | None = None
    """New. Field with a row's image, or list of images, for a vision model: encoded bytes, a path, or a data URI.
    Null means ``image`` or ``images``. They stand where the text has ``<image>``, or else in front of it."""
    max_image_pixels: PositiveInt = 33_554_432
    """New. Most pixels of an image; a larger one is refused before it is decoded."""
    prompt_key: NonEmptyStr = "prompt"
    """New. DPO and RM: field with the prompt, a text or a list of messages. Rows with `context` and `completions`
    are read as NeMo-RL's preference data."""
    chosen_key: NonEmptyStr
    """New. DPO and RM: field with the better response, a text or a list of messages. A list may repeat the prompt,
    and must begin with it if there is no prompt field."""
    rejected_key: NonEmptyStr
    """New. DPO and RM: field with the worse response, in the form of the better one."""
    margin_key: NonEmptyStr | None = None
    """New. Reward models: field with the margin by which the better response should score higher; null means 0. Its
    sign, which says in HelpSteer3's ``overall_preference`` which response is better, is ignored."""
    text_key: NonEmptyStr | None = None
    """New. Distillation over raw text: field of the text; null means ``text``."""
    characters_per_sample: PositiveInt | None = None
    """New. Distillation over raw text: join consecutive rows, a line each, until they have so many characters. Null
    takes each row alone. What is longer than `policy.max_total_sequence_length` is cut there."""
    processor: NonEmptyStr | None = None
    """NeMo-RL's function that makes prompts from rows. Functions for text and images are accepted, since the name of
    the data set and the keys here describe the rows. With ``multichoice_qa_processor``, the field ``options`` (texts
    by letter or in order) follows the question. ``kd_data_processor`` is for ``arrow_text``."""
    split: NonEmptyStr
    """Split of the Hub dataset for training."""
    val_split: NonEmptyStr | None
    """New. Split of the Hub dataset for validation; null holds `num_validation` out of `split`."""
    download_dir: NonEmptyStr | None = None
    """For ``refcoco``: folder with COCO's ``train2014``, relative to the working directory; null means
    ``./coco_images``. Nothing is downloaded to it. Elsewhere accepted."""
    subset: NonEmptyStr | None
    """New. Configuration of the Hub dataset."""
    revision: NonEmptyStr | None = None
    """New. Branch, tag or commit of the Hub dataset; null is its default branch."""
    commit: NonEmptyStr | None = None
    """New. Commit of `revision` at the start of the run. The run finds it and its journal keeps it, so that a
    resumed or replayed run reads the same rows."""
    prompt_template: str = "{question}"
    """New. The user's message to the model, in which ``{question}`` and any field of the problem's metadata are
    filled in."""
    solution_template: str = "{answer}"
    """New. The worked solution for SFT, in which ``{question}``, ``{answer}`` and any field of the problem's
    metadata are filled in. Or a function that writes it, as ``module:function``; ``tandem.coordinator.data.worked``
    has some. The function may also return the messages of a conversation, of which the assistant's are learned."""
    train: tuple[DataSet, ...] = ()
    """Data sets for training, one or a list, instead of `dataset_name` and its keys."""
    validation: tuple[DataSet, ...] = ()
    """Data sets for validation, one or a list. Without any, `split_validation_size` or `num_validation` problems are
    held out of the training sets. If neither is given, null means no validation, as in NeMo-RL. Several sets also
    have separate metrics (``val_NAME/accuracy``), and `grpo.max_val_samples` and the like apply to each."""
    default: DataSet | None = None
    """Defaults of the keys of each set."""
    split_validation_size: NonNegativeFloat = 0.0
    """Problems to hold out, if nothing else says how many: a fraction if less than 1, else a number."""
    shuffle: bool = True
    """Train on the problems in an order that depends on the seed and the epoch; false keeps their own order."""
    num_workers: NonNegativeInt | None = None
    """Accepted: processes that read data. Here it is read once, before the run begins."""
    use_multiple_dataloader: bool = False
    """Draw from the sets of `train` in turns of `num_prompts_per_dataloader` prompts each, instead of by weight."""
    num_prompts_per_dataloader: PositiveInt | None = None
    """Prompts from one data set before the next one's turn; it must divide the prompts of a step."""
    custom_dataloader: NonEmptyStr | None = None
    """With `use_multiple_dataloader`: dotted path of a function that chooses the data set of each prompt of a step,
    such as ``mine.choose``. ``choose(step, sizes, num_prompts)`` returns that many names; `sizes` has the number of
    problems by name. It must depend on nothing else, since a resumed run calls it again. With dynamic sampling, `step`
    counts the batches that are drawn, and `num_prompts` is the size of one. NeMo-RL's
    ``example_custom_dataloader`` takes turns, like the default."""
    rejected_template: str | None = None
    """New. DPO and RM, for generated problems: the worse solution, like the better one in `solution_template`. A
    function may return a list of texts; each makes a pair, and these stay next to one another in the data set."""
    prompt_file: NonEmptyStr | None = None
    """Text file that is filled as a format string: ``{}`` is the prompt, and a brace of the text is written twice, as
    in ``\\boxed{{}}``. Relative to the working directory."""
    system_prompt_file: NonEmptyStr | None = None
    """Text file with the system message; relative to the working directory."""
    system_prompt: NonEmptyStr | None = None
    """The system message itself."""
    max_input_seq_length: PositiveInt
    """Longest prompt, in tokens."""
    environment: NonEmptyStr | None
    """New. Entry of `env` that scores the samples of data sets without an `env_name`."""
    add_bos: bool = True
    """Begin texts without a chat template with what the tokenizer puts in front of a text, such as a
    beginning-of-sequence token; in SFT, DPO, RM and rollouts alike. A chat template writes its own."""
    add_eos: bool = True
    """SFT, DPO and RM: end each turn that the chat template does not close with the token that ends turns."""
    add_generation_prompt: bool = False
    """SFT, DPO and RM: what the chat template writes before each of the assistant's turns belongs to the prompt; with
    false it is learned."""
    add_system_prompt: bool = False
    """SFT, DPO and RM: let the chat template add its default system message."""

    @cached_property
    def chooser(self) -> str | None:
        """Dotted path of the function that chooses between data sets, if there is one."""
        path = self.custom_dataloader if self.use_multiple_dataloader else None
        return None if path is None or self.takes_turns_by_example else path

    @property
    def takes_turns_by_example(self) -> bool:
        """Whether `custom_dataloader` is NeMo-RL's example, which takes turns, like the default."""
        return self.custom_dataloader is not None and self.custom_dataloader.endswith(".example_custom_dataloader")

    @cached_property
    def validation_names(self) -> tuple[str, ...]:
        """Names, for metrics, of several validation sets; empty if there is only one."""
        if not self.train:
            return tuple(self.val_data_paths or ())
        train_names = set_names(self.train)
        first_too = self._holds_out_of_first
        held_out = [
            name
            for index, (name, each) in enumerate(zip(train_names, self.train, strict=True))
            if each.split_validation_size or (first_too and not index)
        ]
        for name in set_names(self.validation):
            held_out.append(make_name_apart(name, held_out))
        return tuple(held_out) if len(held_out) > 1 else ()

    @cached_property
    def train_sets(self) -> tuple[DataConfig, ...]:
        """A section for each training set, as if it were the only one; validation problems are held out of the first
        by default."""
        first, *later_sets = (self.of_set(each) for each in self.train)
        if self._holds_out_of_first:
            first = msgspec.structs.replace(first, num_validation=self.num_validation)
        if not later_sets:
            first = msgspec.structs.replace(first, num_train=self.num_train)
        return (first, *later_sets)

    @cached_property
    def _holds_out_of_first(self) -> bool:
        """Whether validation problems are held out of the first listed set because nothing else says where from."""
        if self.validation or self.num_validation == 0 or self.train[0].split_validation_size:
            return False
        return self.num_validation is not None or not any(each.split_validation_size for each in self.train)

    def of_set(self, data_set: DataSet) -> DataConfig:
        """Return the section for one listed data set, as if it were the only one, and all of it for training."""
        set_values = {key: getattr(data_set, key) for key in OF_EACH_SET}
        return msgspec.structs.replace(
            self,
            **set_values,
            environment=data_set.env_name or self.environment,
            train_data_path=data_set.data_path,
            val_data_path=None,
            val_split=None,
            num_train=None,
            num_validation=None if data_set.split_validation_size else 0,
            split_validation_size=data_set.split_validation_size,
            train=(),
            validation=(),
        )


class JudgeConfig(ConfigSection, frozen=True, kw_only=True):
    """A language model that scores responses: it is shown question and response, and its answer contains the score."""

    base_url: NonEmptyStr | None = None
    """New. OpenAI-compatible endpoint, such as ``https://HOST/v1``; null means the rollout's own engine, which has
    the run's newest weights and needs `policy.generation.expose_http_server`."""
    model: NonEmptyStr | None = None
    """New. Name of the model at the endpoint; required with `base_url`."""
    api_key_env: NonEmptyStr | None = None
    """New. Environment variable of the rollout processes with the endpoint's key; null if it needs none."""
    system_prompt: NonEmptyStr | None = None
    """New. System message to the judge."""
    prompt: NonEmptyStr = (
        "Question:\n{question}\n\nReference answer:\n{answer}\n\nResponse to grade:\n{response}\n\n"
        "How good is the response, from 0 (wrong) to 10 (right)? End with a line 'Score: N'."
    )
    """New. The request to the judge, in which ``{question}``, ``{answer}`` (the reference), ``{response}`` and any
    field of the problem's metadata are filled in."""
    score_pattern: NonEmptyStr = r"(?i)score\W*\s(-?\d+(?:\.\d+)?)"
    """New. Regular expression with the score as its first group; the last match in the judge's answer counts."""
    lowest_score: float = 0.0
    """New. Score with a reward of 0; lower scores count as this one."""
    highest_score: float = 10.0
    """New. Score with a reward of 1; higher scores count as this one."""
    correct_from: float = 1.0
    """New. Lowest reward of a response that counts as solved, for the accuracy."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    """New. Temperature of the judge's answer."""
    max_tokens: PositiveInt = 512
    """New. Most tokens of the judge's answer."""
    extra_body: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Further fields of each request, such as ``{chat_template_kwargs: {enable_thinking: false}}``."""
    max_concurrency: PositiveInt = 16
    """New. Concurrent requests of each rollout process."""
    timeout_s: PositiveFloat = 60.0
    """New. Timeout of one request, in seconds, before it is retried; the environment's `timeout_s` is at least that
    of all attempts together."""
    max_retries: Annotated[int, Meta(ge=0, le=20)] = 4
    """New. Retries of a judgement if the endpoint is unreachable, busy or fails. Pauses grow longer, or are those
    that the endpoint asks for."""
    cache: NonEmptyStr | None = None
    """New. SQLite file of judgements, created if missing: a request that was made before, or is under way, is not
    repeated. Relative to the working directory; several rollouts and runs may share one on a local disk."""
    dollars_per_million_prompt_tokens: NonNegativeFloat = 0.0
    """New. The endpoint's price for prompts, for the metric `spent/judge_dollars`."""
    dollars_per_million_completion_tokens: NonNegativeFloat = 0.0
    """New. The endpoint's price for the judge's answers."""

    @cached_property
    def longest_s(self) -> float:
        """Most seconds of a judgement, with all its requests and the pauses between them."""
        return (self.max_retries + 1) * self.timeout_s + self.max_retries * _LONGEST_PAUSE_S


_LONGEST_PAUSE_S = 60.0
"""Longest pause that the client makes on the endpoint's request."""


class EnvironmentConfig(RewardModelKeys, frozen=True, kw_only=True):
    """A way to score samples. Built in are ``reasoning_gym``, ``math`` (math-verify), ``math_multi_reward``
    (several rewards a sample), ``exact_match``, ``python_code`` (programs that are run on tests), NeMo-RL's
    environments for images (`reward_functions`), and two that reply to the policy: ``calculator`` and
    ``sliding_puzzle_game``. Any other name needs a `class`, a `judge`, a reward model (``reward_model``, or any
    name with a `model_name`), or an agent. An agent is an external program that plays episodes: it is started by
    `command`, or reached at `url`. ``python_rewards`` are the functions given to `tandem.train`; its `num_workers`
    are threads of that program."""

    num_workers: PositiveInt = 1
    """Worker processes of each rollout process, or threads if the class says `runs_in = "threads"`. This many
    samples are scored at once, more if the class is asynchronous. NeMo-RL's base files have 8."""
    timeout_s: PositiveFloat = 10.0
    """New. Timeout of one score or reply, in seconds. A worker process that exceeds it is killed with its
    descendants and replaced. For an agent, the timeout of an episode."""
    on_error: Literal["zero", "drop", "fail"] | None = None
    """New. What happens to a sample if the environment raises an exception, exceeds `timeout_s` or returns an
    invalid reward. zero: the response gets no reward and is not correct. drop: the sample is not trained on and
    counts nowhere. fail: the run ends. null: zero in built-in environments, except for a problem that itself cannot
    be scored; fail in others, and for functions given to `tandem.train`."""
    max_failures: NonNegativeInt | None = None
    """New. Most failed samples of one rollout process; one more ends the run. null means no limit."""
    class_path: NonEmptyStr | None = msgspec.field(name="class", default=None)
    """New. Dotted path of the environment's class, such as ``mine.Judge`` for the class ``Judge`` of a ``mine.py``
    beside the configuration file; null means the built-in one of that name."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of the class."""
    cfg: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings in the form of NeMo-RL's environments, passed to the class as its argument `cfg` if there are any.
    Settings in NeMo-RL's files of environments that are not built (``avqa``, ``dapo`` and the like) are collected
    here."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """For math: how an answer is compared with the reference. hf_math_verify: as expressions, by the library
    math-verify. dapo_math_verify: as text after the last ``Answer:`` of the response, for DAPO's data
    (arXiv:2503.14476, section 4.1)."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] = "math"
    """For math: the form of an answer. english_multichoice: the letter after the last ``Answer:``.
    multilingual_multichoice: the same in the languages of MMLU's translations."""
    reward_functions: tuple[dict[str, Any], ...] = ()
    """For ``clevr-cogent``, ``geometry3k``, ``refcoco`` and ``vlm``: functions that score a response, each with a
    `name` (``format``, ``exact_alnum``, ``math_expr`` or ``bbox_giou``), a `weight` and its `kwargs`. The reward is
    their mean by weight."""
    command: tuple[NonEmptyStr, ...] | None = None
    """New. Program, with arguments, that plays one episode against the rollout's OpenAI-compatible endpoint
    (``docs/agents.md``), in the run's working directory; it is started once per episode."""
    persistent: bool = False
    """New. Whether `command` keeps running: `num_workers` copies in each rollout process, which read episodes from
    their standard input, one per line, until it ends."""
    url: NonEmptyStr | None = None
    """New. Server that plays episodes, instead of a `command`: ``http://HOST:PORT/PATH``."""
    max_concurrency: PositiveInt = 16
    """New. Concurrent episodes of an agent in each rollout process."""
    max_completions: Annotated[int, Meta(ge=1, le=4096)] = 64
    """New. Most responses that one episode of an agent may request."""
    roles: tuple[NonEmptyStr, ...] = ()
    """New. Roles of an agent's episode that the policy plays, such as ``[first, second]``: requests name one as
    ``policy:first``, rewards are given by role, and each role's baseline is over the same role in its group
    (``docs/self_play.md``)."""
    judge: JudgeConfig | None = None
    """New. A language model that scores the responses."""
    verifiers: VerifiersConfig | None = None
    """New. An environment of the package verifiers, whose tasks are the problems of the run."""
    openenv: OpenEnvConfig | None = None
    """New. An environment of OpenEnv, whose episodes are the problems of the run."""
    nemo_gym: NemoGymConfig | None = None
    """New. Agents of NeMo Gym, in NeMo-RL's files ``env.nemo_gym`` itself."""
    harbor: HarborConfig | None = None
    """New. Tasks of Harbor in a folder."""

    @cached_property
    def longest_call_s(self) -> float:
        """Seconds after which a call counts as stuck."""
        return self.timeout_s if self.judge is None else max(self.timeout_s, self.judge.longest_s)

    @cached_property
    def is_agent(self) -> bool:
        """Whether an external program plays episodes."""
        return self.command is not None or self.url is not None or self.packaged is not None

    @cached_property
    def packaged(self) -> PackagedConfig | None:
        """Settings of the packaged environment, if it is one."""
        return self.verifiers or self.openenv or self.nemo_gym or self.harbor

    @cached_property
    def is_reward_model(self) -> bool:
        """Whether a sequence classifier scores the responses."""
        return self.model_name is not None and not self.is_custom and self.judge is None

    @cached_property
    def is_custom(self) -> bool:
        """Whether it is custom rather than built in."""
        return self.class_path is not None or self.is_agent
