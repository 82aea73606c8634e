"""The page's program: what it answers about runs, and whom it does not answer."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from nvml_library import Library
from page_harness import a_refit, a_sample, client, commit, get, make_run, record

from tandem.common.errors import ConfigError, RunFolderError
from tandem.config import build_config
from tandem.coordinator.loop.run import record_outcome
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.page.server import GpuReader, make_app
from tandem.observe.run_folder.journal import Outcome
from tandem.observe.run_folder.journal_writer import Journal
from tandem.observe.run_folder.live import LIVE_NAME, RunStatus

SETTINGS = {
    "grpo": {},
    "policy": {"model_name": "m", "train_global_batch_size": 512},
    "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
}


def say_live(**fields: object) -> None:
    live = msgspec.convert({"at": 5.0, "step": 3, "num_steps": 9, "phase": "training"} | fields, RunStatus)
    Path("run", LIVE_NAME).write_bytes(msgspec.json.encode(live))


def test_runs_are_listed_with_how_they_are() -> None:
    make_run("first").close()
    with make_run("second", num_steps=0, run_id="another"):
        page = client("first", "second")
        first, second = get(page, "/api/runs")
        assert (first["name"], first["run_id"], first["algorithm"], first["model"]) == (
            "first",
            "a-run",
            "grpo",
            "model",
        )
        assert (first["state"], first["last_step"], first["num_steps"]) == ("ended", 3, 9)
        assert (second["index"], second["state"], second["last_step"]) == (1, "running", None)


@pytest.mark.parametrize("outcome", ["finished", "failed", "interrupted"])
def test_how_a_run_ended_is_what_its_journal_says_last(outcome: Outcome) -> None:
    with make_run() as journal:
        say_live()
        record_outcome(journal, lambda: FinishRun(outcome=outcome))
        page = client("run")
        assert get(page, "/api/runs")[0]["state"] == outcome, "before its coordinator is gone"
        assert get(page, "/api/runs/0/live") is None
        journal.record_config(b"{}")
        assert get(page, "/api/runs")[0]["state"] == "running", "it was resumed"
        assert get(page, "/api/runs/0/live")["phase"] == "training"
    assert get(page, "/api/runs")[0]["state"] == "ended", "and killed before it said anything"


def test_a_run_is_killed_if_nobody_holds_its_lock() -> None:
    with make_run():
        say_live()
        assert get(client("run"), "/api/runs/0/live")["phase"] == "training"
    assert get(client("run"), "/api/runs")[0]["state"] == "ended"
    assert get(client("run"), "/api/runs/0/live") is None


def test_who_asks_whether_a_folder_is_taken_keeps_nobody_from_it() -> None:
    make_run().close()
    page = client("run")
    for _ in range(20):
        get(page, "/api/runs")
        Journal.open(Path("run")).close()


def test_metrics_have_groups_and_curves() -> None:
    make_run().close()
    page = client("run")
    names = {each["name"]: each["group"] for each in get(page, "/api/runs/0/metrics")["names"]}
    assert names == {
        "reward": "reward",
        "loss": "loss",
        "val_accuracy": "validation",
        "memory_training_trainer_gb": "memory",
        "seconds/total": "seconds",
        "seconds/generation": "seconds",
        "seconds/policy_training": "seconds",
    }
    curves = get(page, "/api/runs/0/series?names=reward,loss,val_accuracy,seconds/total,nothing")
    assert curves["reward"] == {"step": [1, 2, 3], **{key: [0.1, 0.2, 0.3] for key in ("mean", "low", "high")}}
    assert curves["loss"]["mean"] == [-1, None, -3], "not a number"
    assert curves["val_accuracy"]["step"] == [2]
    assert curves["seconds/total"]["mean"] == [2, 2, 2]
    assert "nothing" not in curves
    assert list(get(page, "/api/runs/0/memory")) == ["memory_training_trainer_gb"]
    assert get(page, "/api/runs/0/series?names=reward&from=2&to=2")["reward"]["step"] == [2]


def test_curves_follow_a_run_also_through_a_resume() -> None:
    with make_run() as journal:
        page = client("run")
        path = "/api/runs/0/series?names=reward,val_accuracy"
        assert get(page, path)["reward"]["step"] == [1, 2, 3]
        commit(journal, 4)
        assert get(page, path)["reward"]["step"] == [1, 2, 3, 4]
        assert get(page, path)["val_accuracy"]["step"] == [2, 4]
        journal.forget_after(1)
        assert get(page, path)["reward"]["step"] == [1]
        commit(journal, 2)
        assert get(page, path)["reward"]["step"] == [1, 2]


def test_refits_and_events() -> None:
    with make_run() as journal:
        for version in range(3):
            journal.record_refit(a_refit(version))
        for text in ("one", "two", "three"):
            journal.record_event("rollout-0", text)
        page = client("run")
        refits = get(page, "/api/runs/0/refits?limit=2")
        assert [refit["version"] for refit in refits] == [1, 2]
        assert refits[0]["digest"] == "8000000000000001", "JavaScript would round the number"
        assert refits[0]["share_of_bound"] == 0.5
        assert not refits[0]["aliased"]
        events = get(page, "/api/runs/0/events?limit=2")
        assert [(event["source"], event["text"]) for event in events] == [("rollout-0", "two"), ("rollout-0", "three")]
        assert [event["text"] for event in get(page, f"/api/runs/0/events?after={events[0]['id']}")] == ["three"]


def test_samples_are_filtered_and_sorted() -> None:
    make_run().close()
    rows = [
        a_sample(2, g, s, reward=g + s / 10, length=9 - g - s, advantage=None if s else g)
        for g in (0, 1)
        for s in (0, 1)
    ]
    record("run", rows)
    record("run", [a_sample(1, 0, 0, response="Forty-Two")])
    record("run", [a_sample(2, 5, 0, problem_id="problem-1")], is_validation=True)
    page = client("run")

    def places(query: str) -> list[tuple[int, int]]:
        return [(row["group"], row["sample"]) for row in get(page, f"/api/runs/0/samples?{query}")["rows"]]

    newest = get(page, "/api/runs/0/samples")
    assert (newest["step"], newest["total"]) == (2, 4)
    assert newest["steps"] == {"train": [1, 2], "validate": [2, 2]}
    assert places("") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places("sort=reward&descending=1") == [(1, 1), (1, 0), (0, 1), (0, 0)]
    assert places("sort=length") == [(1, 1), (0, 1), (1, 0), (0, 0)]
    assert places("sort=advantage&descending=1") == [(1, 0), (0, 0), (0, 1), (1, 1)], "without one is last"
    assert places("offset=1&limit=2") == [(0, 1), (1, 0)]
    assert places("group=1") == [(1, 0), (1, 1)]
    assert places("min_reward=0.1&max_reward=1") == [(0, 1), (1, 0)]
    assert places("step=1&contains=forty") == [(0, 0)]
    assert places("contains=forty") == []
    assert places("step=7") == []
    assert places("purpose=validate") == [(5, 0)]
    of_problem = get(page, "/api/runs/0/problems/problem-1/samples")
    assert [(row["purpose"], row["group"]) for row in of_problem] == [("train", 1), ("train", 1), ("validate", 5)]


def test_a_sample_has_its_tokens() -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({str(i): i for i in range(9)}, unk_token="0"))
    tokenizer.decoder = Fuse()
    Path("model").mkdir()
    tokenizer.save("model/tokenizer.json")
    make_run().close()
    record("run", [a_sample(1, 0, 0), a_sample(1, 0, 1)])
    page = client("run")
    sample = get(page, "/api/runs/0/samples/1/0/1")
    assert (sample["sample"], len(sample["tokens"])) == (1, 5)
    assert "token_ids" not in sample
    prompt, made = sample["tokens"][1], sample["tokens"][2]
    assert prompt == {
        "id": 1,
        "text": "1",
        "made_by_policy": False,
        "logprob": None,
        "trainer_logprob": None,
        "version": None,
    }
    assert made | {"logprob": None} == prompt | {"id": 2, "text": "2", "made_by_policy": True, "version": 3}
    assert made["logprob"] == pytest.approx(-0.25)
    assert page.get("/api/runs/0/samples/1/0/9").status_code == 404


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    make_run().close()
    record("run", [a_sample(1, 0, 0)])
    assert [token["text"] for token in get(client("run"), "/api/runs/0/samples/1/0/0")["tokens"]][:2] == ["[0]", "[1]"]


def test_a_damaged_file_is_one_line() -> None:
    make_run().close()
    record("run", [a_sample(1, 0, 0)])
    (shard,) = Path("run/samples").glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:100])
    answer = client("run").get("/api/runs/0/samples")
    assert answer.status_code == 404
    assert shard.name in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/1/live", 404, "there is no run 1"),
        ("/api/runs/x/live", 404, "Not Found"),
        ("/api/runs/0/series?names=a&points=-1", 400, "points=-1: expected a whole number from 1"),
        ("/api/runs/0/series?names=a&from=x", 400, "from=x: expected a whole number"),
        ("/api/runs/0/samples?sort=colour", 400, "sort=colour: expected one of group, reward"),
        ("/api/runs/0/samples?min_reward=much", 400, "min_reward=much: expected a number"),
        ("/api/nothing", 404, "Not Found"),
        ("/nothing", 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_one_line(path: str, status: int, text: str) -> None:
    make_run().close()
    answer = client("run").get(path)
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_no_file_beside_the_static_ones_can_be_read() -> None:
    make_run().close()
    Path("static").mkdir()
    Path("static/index.html").write_text("<p>the page")
    Path("secret.txt").write_text("secret")
    Path("static/link.txt").symlink_to(Path("secret.txt").absolute())
    page = client("run", static=Path("static"))
    assert page.get("/").text == "<p>the page"
    for path in (
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e%2fsecret.txt",
        "//etc/passwd",
        "/link.txt",
    ):
        answer = page.get(path)
        assert answer.status_code == 404, path
        assert "secret" not in answer.text.replace(path, "").replace("secret.txt", "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(method: str) -> None:
    make_run().close()
    answer = client("run").request(method, "/api/runs")
    assert answer.status_code == 405
    assert "read-only" in answer.json()["error"]


def test_it_writes_nothing_to_the_run_folder() -> None:
    make_run().close()
    record("run", [a_sample(1, 0, 0)])
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    page = client("run")
    for path in ("", "/0/metrics", "/0/series?names=reward", "/0/live", "/0/refits", "/0/events", "/0/samples"):
        get(page, f"/api/runs{path}")
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8700", 200),
        ("localhost:9000", 200),
        ("[::1]:8700", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.1.7:8700", 403),
        ("", 403),
    ],
)
def test_on_loopback_a_name_that_was_rebound_is_not_answered(host: str, status: int) -> None:
    make_run().close()
    answer = client("run").get("/api/runs", headers={"host": host})
    assert answer.status_code == status
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_elsewhere_a_token_is_needed_once() -> None:
    make_run().close()
    page = client("run", token="the-token")
    elsewhere = {"host": "node-7:8700"}
    for path in ("/api/runs", "/", "/api/runs?token=another", "/api/runs?token=", "/api/stream"):
        assert page.get(path, headers=elsewhere).status_code == 401, path
    first = page.get("/api/runs?token=the-token&x=1", headers=elsewhere, follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/api/runs?x=1")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    page.cookies.clear()
    assert page.get("/api/runs", headers={"cookie": cookie.split(";")[0]}).status_code == 200
    assert page.get("/api/runs", headers={"cookie": "tandem_page=another"}).status_code == 401


def test_a_folder_without_a_run_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(RunFolderError, match="empty holds no run"):
        make_app([Path("empty")], None)


def test_a_folder_that_loses_its_run_is_one_line() -> None:
    make_run().close()
    page = client("run")
    Path("run").rename("moved")
    assert "holds no run" in page.get("/api/runs/0/metrics").json()["error"]
    Path("moved").rename("run")
    with sqlite3.connect("run/journal.sqlite") as connection:
        connection.execute("DROP TABLE metrics")
    connection.close()
    assert "no such table" in page.get("/api/runs/0/series?names=reward").json()["error"]


def test_what_the_coordinator_was_writing_is_not_there_yet() -> None:
    with make_run():
        Path("run", LIVE_NAME).write_text(json.dumps({"at": 1.0})[:5])
        assert get(client("run"), "/api/runs/0/live") is None


def test_gpus_are_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with make_run():
        page = client("run")
        assert get(page, "/api/runs/0/gpus") == [], "it has not begun"
        assert not library.num_opened
        say_live()
        first, second = get(page, "/api/runs/0/gpus")
        assert (first["index"], first["name"], first["utilisation"]) == (0, "H200", 0.75)
        assert (first["memory_gb"], first["used_gb"]) == (150.0, 50.0)
        assert second["utilisation"] is None
        get(page, "/api/runs/0/gpus")
    assert library.num_opened <= 2, "not more than every two seconds"


def test_a_driver_that_hangs_holds_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    is_asked, ends = threading.Event(), threading.Event()

    def hang() -> None:
        is_asked.set()
        assert ends.wait(60)

    monkeypatch.setattr(library, "nvmlInit", hang)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpus = GpuReader()
    first = threading.Thread(target=gpus.read)
    first.start()
    assert is_asked.wait(60)
    assert gpus.read() == [], "the last that is known"
    ends.set()
    first.join()
    assert len(gpus.read()) == 2


def test_a_driver_that_is_not_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with make_run():
        say_live()
        assert get(client("run"), "/api/runs/0/gpus") == []


@pytest.mark.parametrize(
    ("given", "means"), [("auto", "auto"), ("off", "off"), (False, "off"), (8700, 8700), (65535, 65535)]
)
def test_the_configuration_says_where_the_page_listens(given: object, means: object) -> None:
    assert build_config({**SETTINGS, "logger": {"page": given}}).logger.page == means


@pytest.mark.parametrize("given", ["always", True])
def test_what_is_no_port_is_refused_with_the_choices(given: object) -> None:
    with pytest.raises(ConfigError, match=r"logger\.page: expected auto, off or an integer at least 1"):
        build_config({**SETTINGS, "logger": {"page": given}})
