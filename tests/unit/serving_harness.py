"""A tiny model behind OpenAI's API in this process: byte-level tokenizer, chat template, the real engine and server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_harness
import openai
import tokenizers
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.rollout.engine import Engine
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.driver import EngineDriver
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.server import HttpServer, listen
from tandem.samples.tokenizer import Tokenizer

SPECIAL = ["<bos>", "<eos>", "<user>", "<assistant>"]
VOCABULARY = 256 + len(SPECIAL)
EOS = 257
MAX_LENGTH = 96
NAME = "tiny"
TEMPLATE = (
    "<bos>{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    """Write a tokenizer each of whose tokens spells a byte, and load it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>", eos_token="<eos>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return Tokenizer(wrapped, str(folder))


def make_model(folder: Path, **changes: Any) -> Any:
    """Write a tiny model's configuration and tokenizer; return the model."""
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": EOS, "initializer_range": 0.1}
    model = engine_harness.make_model("qwen3", folder, **{**sizes, **changes})
    write_tokenizer(folder)
    return model


def text_ids(text: str) -> list[int]:
    """Return the tokens of a text, by the order of the byte-level alphabet."""
    command = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [command[char] for piece, _ in pieces for char in piece]


class Driving:
    """An engine that a thread drives for as long as the block lasts."""

    def __init__(self, engine: Engine, num_places: int = 16) -> None:
        self.engine = engine
        self.driver = EngineDriver(engine, most_at_once=num_places)
        self.error: BaseException | None = None
        self._is_over = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._thread = threading.Thread(target=self._drive)

    def __enter__(self) -> Driving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()
        self._is_over.set()
        self._thread.join(120)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the engine make no token inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.go_on()

    def hold(self) -> None:
        """Have the engine make no token until it goes on."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Have it make tokens again."""
        self._goes_on.set()

    def _drive(self) -> None:
        try:
            while not self._is_over.is_set():
                self.driver.wait(0.01)
                if self._goes_on.wait(0.01):
                    self.driver.work()
        except BaseException as error:
            self.error = error
            self.driver.close("the engine has failed")


@contextlib.contextmanager
def served(
    driving: Driving, tokenizer: Tokenizer, *, token: str | None = None, deadline_s: float = 60
) -> Iterator[str]:
    """Serve a model; yield the address."""
    model = ServedModel(NAME, tokenizer, driving.driver, max_length=MAX_LENGTH, vocabulary=VOCABULARY)
    with at(make_app(only_with(token, model), deadline_s=deadline_s)) as url:
        yield url


@contextlib.contextmanager
def at(app: ASGIApp) -> Iterator[str]:
    """Serve an application; yield the address."""
    with HttpServer(app, listen("127.0.0.1", 0)) as server:
        yield server.url


@contextlib.contextmanager
def client(url: str, token: str = "none") -> Iterator[openai.OpenAI]:
    """Yield OpenAI's client, which asks once and no more."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=60) as made:
        yield made
