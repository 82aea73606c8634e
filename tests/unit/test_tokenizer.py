"""The tokenizer made for a new model, as Hugging Face reads it, and how conversations become tokens."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.config import Config, build_config, config_from_json, config_to_json, dump_yaml
from tandem.config.schema import NewModel
from tandem.samples import chat_templates
from tandem.samples.model_files import inline_templates, load_tokenizer, write_new_model
from tandem.samples.tokenizer import Tokenizer

CHARACTERS = "0123456789+-= "
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
USER = [{"role": "user", "content": "1 + 2"}]


def config(**tokenizer: Any) -> Config:
    return build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model", "tokenizer": tokenizer or None},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def new_model(**changes: Any) -> NewModel:
    return NewModel(**{"config": SIZES, "characters": CHARACTERS, **changes})


@pytest.fixture
def tokenizer() -> Tokenizer:
    write_new_model(Path("model"), new_model())
    return load_tokenizer(config())


# NeMo-RL v0.7, nemo_rl/algorithms/utils.py, get_tokenizer: null concatenates contents, a name that ends in .jinja is
# opened, anything else but "default" is the template's text.
def test_null_writes_contents_alone(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "1"}, *USER, {"role": "assistant", "content": "3"}]
    replaced = load_tokenizer(config(name="model", chat_template=None))
    own = replaced.hugging_face.apply_chat_template(messages, tokenize=False)
    assert own == "".join(message["content"] for message in messages) == "11 + 23"
    assert replaced.render_chat(messages, add_generation_prompt=True) == own
    assert tokenizer.render_chat(messages, add_generation_prompt=True) != own


def test_a_template_may_be_in_a_file() -> None:
    write_new_model(Path("model"), new_model())
    Path("own.jinja").write_text("{% for message in messages %}={{ message.content }}={% endfor %}")
    replaced = load_tokenizer(config(name="model", chat_template="own.jinja"))
    assert replaced.render_chat(USER, add_generation_prompt=True) == "=1 + 2="


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("missing.jinja", "cannot read 'missing.jinja': No such file or directory"),
        ("model.jinja", "cannot read 'model.jinja': it is a directory, not a text file"),
        ("empty.jinja", "'empty.jinja' is no Jinja template: it writes no message"),
        ("own.txt", "'own.txt' is no Jinja template: it writes no message; the name of a file with one ends in .jinja"),
    ],
)
def test_a_template_that_is_none_is_refused(tokenizer: Tokenizer, template: str, message: str) -> None:
    Path("model.jinja").mkdir()
    Path("empty.jinja").write_text("Hello")
    with pytest.raises(ConfigError) as error:
        load_tokenizer(config(name="model", chat_template=template))
    assert str(error.value) == f"policy.tokenizer.chat_template: {message}"


def test_the_text_of_a_template_travels(tokenizer: Tokenizer) -> None:
    Path("own.jinja").write_text("{{ messages[0].content }}")
    settings = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model", "tokenizer": {"chat_template": "own.jinja"}},
            "data": {"dataset_name": "jsonl", "train_data_path": "rows.jsonl"},
            "env": {"mine": {"model_name": "judge", "tokenizer": {"chat_template": "own.jinja"}}},
        }
    )
    text = inline_templates(settings)
    Path("own.jinja").unlink()
    judge = text.env["mine"].tokenizer
    assert judge is not None
    assert text.policy.tokenizer.chat_template == judge.chat_template == "{{ messages[0].content }}"
    assert load_tokenizer(text).render_chat(USER, add_generation_prompt=True) == "1 + 2"
    with pytest.raises(ConfigError, match=r"^policy.tokenizer.chat_template: cannot read 'own.jinja': No such file"):
        inline_templates(settings)


def test_null_of_an_earlier_journal_is_the_tokenizers_own() -> None:
    written = config_to_json(config())
    earlier = written.replace(b'"chat_template":"default"', b'"chat_template":null')
    assert earlier != written
    assert config_from_json(earlier) == config()
    assert config(chat_template=None) == build_config(yaml.safe_load(dump_yaml(config(chat_template=None))))


def test_hugging_face_loads_what_was_written(tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained("model")
    settings = transformers.AutoConfig.from_pretrained("model")
    assert len(theirs) == settings.vocab_size == len(CHARACTERS) + 3
    assert (settings.model_type, settings.hidden_size, settings.num_hidden_layers) == ("qwen3", 32, 1)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (
        settings.pad_token_id,
        settings.bos_token_id,
        settings.eos_token_id,
    )
    assert theirs("7 - 12", add_special_tokens=False).input_ids == tokenizer.encode("7 - 12")
    assert theirs("7 - 12").input_ids == theirs.apply_chat_template(
        [{"role": "user", "content": "7 - 12"}], return_dict=False
    ), "a plain text begins as a conversation does"
    assert theirs("7 - 12").input_ids == tokenizer.encode("7 - 12", add_special_tokens=True)
    prompt = theirs.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert prompt == tokenizer.encode_chat(USER, add_generation_prompt=True)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    assert model.get_input_embeddings().num_embeddings == len(theirs)


def test_a_character_is_a_token_and_comes_back(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(CHARACTERS)
    assert len(tokens) == len(set(tokens)) == len(CHARACTERS)
    assert tokenizer.decode(tokens) == CHARACTERS
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode(" 1  2 "), tokenizer.eos_id]) == " 1  2 "


def test_a_conversation_is_the_question_and_then_the_answer(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id is not None
    question = [tokenizer.bos_id, *tokenizer.encode("1 + 2")]
    assert tokenizer.encode_chat(USER, add_generation_prompt=True) == question
    answered = [*USER, {"role": "assistant", "content": " = 3"}]
    whole = [*question, *tokenizer.encode(" = 3"), tokenizer.eos_id]
    assert tokenizer.encode_chat(answered, add_generation_prompt=False) == whole


@pytest.mark.parametrize("text", ["1 × 2", "<bos>1 × 2"])
def test_a_character_outside_the_alphabet_is_named(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(DataError, match=r"^the tokenizer in model does not know the character '×'$"):
        tokenizer.encode(text)


def test_several_characters_are_named_together_in_their_order(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"^the tokenizer in model does not know the characters 'zxé'$"):
        tokenizer.encode("z1x2zé")
    assert tokenizer.unknown_characters("<eos>1 + 2") == ""
    assert not tokenizer.knows_every_character


def test_the_same_model_is_written_byte_for_byte() -> None:
    for name, characters in (("one", CHARACTERS), ("two", CHARACTERS[::-1])):
        write_new_model(Path(name), new_model(characters=characters))
    files = sorted(path.name for path in Path("one").iterdir())
    assert files == sorted(path.name for path in Path("two").iterdir())
    for name in files:
        assert (Path("one") / name).read_bytes() == (Path("two") / name).read_bytes(), name


def test_a_model_type_that_does_not_exist_leaves_nothing_behind() -> None:
    with pytest.raises(ConfigError, match=r"no model type 'lama'; did you mean 'llama'\?"):
        write_new_model(Path("model"), new_model(config={"model_type": "lama"}))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space left on device")])
def test_a_model_that_cannot_be_written_whole_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(ModelError, match=r"cannot write a new model to 'models/new/model': No space left on device$"):
        write_new_model(Path("models/new/model"), new_model())
    assert list(Path().iterdir()) == []
    monkeypatch.undo()
    write_new_model(Path("models/new/model"), new_model())
    assert [path.name for path in Path("models/new").iterdir()] == ["model"]


def test_what_a_killed_attempt_left_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f".model.{os.getpid()}.tmp").mkdir()  # its process may have had the same number, as in a container
    write_new_model(Path("model"), new_model())
    assert load_tokenizer(config()).encode("1")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_what_is_no_file_is_not_opened(tokenizer: Tokenizer, name: str) -> None:
    Path("model", name).unlink(missing_ok=True)
    os.mkfifo(f"model/{name}")
    message = f"^policy.tokenizer.name: cannot load a tokenizer from 'model': 'model/{name}' is a FIFO, not a file$"
    with pytest.raises(ModelError, match=message):
        load_tokenizer(config())


def test_the_chat_template_gets_its_variables(tokenizer: Tokenizer) -> None:
    template = "{% if enable_thinking %}1 + {% endif %}{{ messages[0].content }}"
    plain, thinking = (
        load_tokenizer(config(chat_template=template, chat_template_kwargs=given))
        for given in (None, {"enable_thinking": True})
    )
    assert plain.render_chat(USER, add_generation_prompt=True) == "1 + 2"
    assert thinking.render_chat(USER, add_generation_prompt=True) == "1 + 1 + 2"
    assert thinking.render_chat(USER, add_generation_prompt=True, variables={"enable_thinking": False}) == "1 + 2"
    message = (
        "policy.tokenizer.chat_template_kwargs.enable_thinkng: the chat template of model reads no such variable; did "
        "you mean 'enable_thinking'?"
    )
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(config(chat_template=template, chat_template_kwargs={"enable_thinkng": True}))
    assert str(caught.value) == message


def test_a_template_is_not_blamed_for_a_machine_that_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_templates._deadline(0.2):
        time.sleep(1.0)  # no processor works for it
    monkeypatch.setattr(chat_templates, "_BUSY_TIMES", 2)
    with pytest.raises(chat_templates._TooSlow), chat_templates._deadline(0.2):
        time.sleep(300.0)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses messages of user: Range too big"),
        (f"{'{% for i in range(10**5) %}' * 4}{'{% endfor %}' * 4}", "takes longer than 0.5 s for one conversation"),
        ("{{ 10 ** (10 ** 10) }}", "takes longer than 0.5 s for one conversation"),
        ("{{ 'a' * 10 ** 13 }}", "needs too much memory for one conversation"),
        ("{{ messages[-1].content * 2 * 10 ** 7 }}", "makes 100,000,000 characters of one conversation"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ 1 / 0 }}", "refuses messages of user: division by zero"),
        (
            "{{ messages[0].content.nothing.at.all }}",
            "refuses messages of user: 'str object' has no attribute 'nothing'",
        ),
    ],
)
def test_a_template_that_does_not_end_is_stopped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str, what: str
) -> None:
    if "0.5" in what:
        monkeypatch.setattr(chat_templates, "DEADLINE_S", 0.5)
    broken = load_tokenizer(config(name="model", chat_template=template))
    handler = signal.getsignal(signal.SIGALRM)
    message = f"^policy.tokenizer.chat_template: the chat template of model {what}"
    with pytest.raises(ConfigError, match=message) as caught:
        broken.render_chat(USER, add_generation_prompt=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=message.replace("of user", "of user, assistant, user")):
        broken.encode_continuation(USER, broken.eos_id)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert not 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 1, "the timer of a test that takes too long goes on"


def test_memory_is_limited_only_within() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with chat_templates.memory_limit(), pytest.raises(MemoryError):
        bytearray(3 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_another_ones_timer_goes_on_after_a_rendering(tokenizer: Tokenizer) -> None:
    rung: list[int] = []
    of_the_tests = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        tokenizer.render_chat(USER, add_generation_prompt=True)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 2.0
        deadline = time.monotonic() + 30.0
        while not rung and time.monotonic() < deadline:
            time.sleep(0.02)
        assert rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *of_the_tests)


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(
        ModelError, match=r"^policy.model_name: cannot write a new model to 'file/model': Not a directory$"
    ):
        write_new_model(Path("file/model"), new_model())


def test_a_folder_without_a_tokenizer_is_one_line() -> None:
    Path("model").mkdir()
    with pytest.raises(ModelError, match=r"^policy.tokenizer.name: cannot load a tokenizer from 'model': .+") as caught:
        load_tokenizer(config())
    assert "\n" not in str(caught.value)


def test_the_configured_template_replaces_the_tokenizers_own(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} ={% endif %}"
    replaced = load_tokenizer(config(name="model", chat_template=template))
    assert replaced.encode_chat(USER, add_generation_prompt=True) == tokenizer.encode("1 + 2 =")
    assert replaced.encode_chat(USER, add_generation_prompt=False) == tokenizer.encode("1 + 2")
    default = load_tokenizer(config(name="model", chat_template="default"))
    rendered = tokenizer.render_chat(USER, add_generation_prompt=True)
    assert default.render_chat(USER, add_generation_prompt=True) == rendered == "<bos>1 + 2"


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('only system messages') }}"])
def test_a_template_that_fails_is_one_line(tokenizer: Tokenizer, template: str) -> None:
    broken = load_tokenizer(config(name="model", chat_template=template))
    with pytest.raises(
        ConfigError, match=r"^policy.tokenizer.chat_template: .* refuses messages of user: .+"
    ) as caught:
        broken.render_chat(USER, add_generation_prompt=True)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_merges_characters_has_no_alphabet() -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    fast.train_from_iterator(["what is one plus two"] * 10, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    wrapped.save_pretrained("model")
    bpe = load_tokenizer(config())
    assert bpe.decode(bpe.encode("what is 1 × 2?\n")) == "what is 1 × 2?\n"
    assert bpe.bos_id is None
    assert not bpe.has_chat_template
    assert bpe.encode_chat(USER, add_generation_prompt=True) == wrapped("1 + 2").input_ids


def test_torch_is_not_imported(tokenizer: Tokenizer) -> None:
    probe = (
        "import sys; from tandem.config import build_config;"
        "from tandem.samples.model_files import load_tokenizer; assert 'transformers' not in sys.modules;"
        "c = build_config({'grpo': {}, 'policy': {'model_name': 'model'},"
        " 'data': {'dataset_name': 'reasoning_gym', 'task': 'chain_sum'}});"
        "t = load_tokenizer(c); t.encode_chat([{'role': 'user', 'content': '1 + 2'}], add_generation_prompt=True);"
        "from tandem.config.schema import NewModel; from pathlib import Path;"
        "from tandem.samples.model_files import write_new_model;"
        "write_new_model(Path('other'), NewModel(config={'model_type': 'llama'}, characters='01'));"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


# --- conversations that go on ----------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOLD = [{"role": "tool", "content": "84"}, {"role": "user", "content": "so?"}]


def byte_pairs(template: str | None) -> Tokenizer:
    """Train a byte-pair tokenizer on so little that `48` is one token, and give it ChatML's special ones."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(["48 48 48 48 user assistant"] * 9, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    wrapped.chat_template = template
    return Tokenizer(wrapped, "here")


def test_only_what_is_new_is_tokenised() -> None:
    tokenizer = byte_pairs(CHATML)
    new = "<|im_start|>tool\n84<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    # What ends the turn is there already, but for the line break that the template writes behind it.
    ended = tokenizer.encode_continuation(TOLD, tokenizer.eos_id)
    assert tokenizer.decode(ended, skip_special_tokens=False) == "\n" + new
    (last_id,) = tokenizer.encode("7")
    cut_off = tokenizer.encode_continuation(TOLD, last_id)
    assert tokenizer.decode(cut_off, skip_special_tokens=False) == "<|im_end|>\n" + new
    assert cut_off == [tokenizer.eos_id, *ended]
    # It is what the template makes of the whole conversation, token by token.
    before = [*USER, {"role": "assistant", "content": "7"}]
    whole = tokenizer.encode_chat([*before, *TOLD], add_generation_prompt=True)
    assert whole[-len(cut_off) :] == cut_off


def test_tokens_do_not_grow_together_where_a_turn_ends() -> None:
    tokenizer = byte_pairs(None)
    assert len(tokenizer.encode("48")) == 1
    (last_id,) = tokenizer.encode("4")
    told = [{"role": "user", "content": "8"}]
    assert tokenizer.encode_continuation(told, last_id) == tokenizer.encode("8")
    # Only a special token can be the end that the template writes; this one is the policy's own.
    (last_id,) = tokenizer.encode("8")
    assert tokenizer.encode_continuation(told, last_id) == tokenizer.encode("8")


def test_the_new_models_template_goes_on(tokenizer: Tokenizer) -> None:
    told = [{"role": "user", "content": "84"}]
    assert tokenizer.encode_continuation(told, tokenizer.eos_id) == tokenizer.encode("84")
    assert tokenizer.encode_continuation(told, tokenizer.encode("4")[0]) == [tokenizer.eos_id, *tokenizer.encode("84")]


def test_a_template_that_forgets_turns_is_refused() -> None:
    tokenizer = byte_pairs("{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match=r"^policy.tokenizer.chat_template: .* drops earlier turns$"):
        tokenizer.encode_continuation([{"role": "user", "content": "1"}], tokenizer.eos_id)
