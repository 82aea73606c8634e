"""A live run of a vision model answers chats with pictures, which stay out of the run's folder."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.observe.run_folder.live import read_engine_servers
from tandem.samples.images.store import ImageFolder
from tests.harness.runs.running import BIN, DIGITS, TIMEOUT_S, Command, write_config
from tests.harness.vision_models import encoded, picture, write_vision_model

GATE = Path("go")
"""The environment scores nothing before this file is there."""
GATED = DIGITS.replace(
    "        correct =",
    f"""        import time
        from pathlib import Path
        while not Path({str(GATE)!r}).exists():
            time.sleep(0.01)
        correct =""",
)
SEES: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "max_val_samples": 4, "val_period": 0},
    "policy": {
        "model_name": "sees",
        "new_model": None,
        "max_total_sequence_length": 128,
        "generation": {"expose_http_server": True},
    },
    "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 16, "num_validation": 4},
    "env": {"digits": {"class": "digits.Digits", "timeout_s": TIMEOUT_S}},
    "cluster": {"deadlines": {"generate_s": TIMEOUT_S}},
}


def ask(client: openai.OpenAI, url: str) -> list[float]:
    """Return the log-probabilities of an answer about a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "how many?"}]
    messages: Any = [{"role": "user", "content": parts}]
    made = client.chat.completions.create(
        model="policy", messages=messages, seed=3, max_tokens=4, logprobs=True, extra_body={"ignore_eos": True}
    )
    assert made.choices[0].logprobs is not None
    return [each.logprob for each in made.choices[0].logprobs.content or []]


def test_a_live_run_answers_about_pictures_and_a_chat_shows_it_some() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    pictures = [encoded(picture(40, 40, seed)) for seed in range(2)]
    uris = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in pictures]
    Path("0.png").write_bytes(pictures[0])
    config = write_config(SEES)
    Path("digits.py").write_text(GATED)
    with Command("coordinator", "up", config) as run:
        run.wait_for(r"rollout-0 answers OpenAI's API at http://127.0.0.1:\d+/v1")
        servers = read_engine_servers(Path("run"))
        assert servers is not None
        url = f"{servers['rollout-0'].url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            first, second = (ask(client, uri) for uri in uris)
            assert first != second
            assert ask(client, uris[0]) == first
            with pytest.raises(openai.BadRequestError, match="nothing is fetched over a network"):
                ask(client, "https://example.com/a.png")
        words = [BIN / "coordinator", "chat", "run", "--image", "0.png", "--max-tokens", "4"]
        chat = subprocess.run(
            words, input="how many?\n", capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (chat.returncode, chat.stderr) == (0, "")
        GATE.touch()
        assert run.wait() == 0, run.output()
    images = ImageFolder(Path("run/images"))
    assert not any(images.has(hashlib.sha256(data).hexdigest()) for data in pictures)
