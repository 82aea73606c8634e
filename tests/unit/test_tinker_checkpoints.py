"""Saved states without a server: whose they are, who may load them, and links that hold for a while."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tandem.serving.tinker import states as states_module
from tandem.serving.tinker.requests import SetTtl, TinkerRefused
from tandem.serving.tinker.states import SavedStates, StateFolder, StateRecord, check_ttl, now

MODEL = "session-1:train:0"


def save(states: StateFolder, name: str = "kept") -> StateRecord:
    """Save a state as trainers do."""
    folder = states.folder_for(MODEL, name)
    for part in ("policy", "optimizer"):
        (folder / part).mkdir(parents=True)
        (folder / part / "a b.safetensors").write_bytes(b"weights")
    (folder / "manifest-00000.json").write_text("{}")
    if states.kind == "external_weights":
        assert states.strip(MODEL, name) == 7
        assert [path.name for path in folder.iterdir()] == ["policy"]
    record = StateRecord(
        owner="me",
        model_id=MODEL,
        name=name,
        base_model="base",
        lora_rank=None,
        created_at=now(),
        num_bytes=7,
        kind=states.kind,
    )
    states.write(record)
    return record


def refusal(status: int) -> pytest.RaisesExc[TinkerRefused]:
    return pytest.RaisesExc(TinkerRefused, check=lambda error: error.status == status)


@pytest.fixture
def saved() -> SavedStates:
    states = StateFolder(Path("states").absolute())
    found = SavedStates(states)
    save(states)
    save(found.external, "whole")
    return found


def test_kinds_of_states_are_kept_apart(saved: SavedStates) -> None:
    assert [each["checkpoint_id"] for each in saved.of("me", None)] == ["weights/kept", "external_weights/whole"]
    assert saved.of("me", "session-2:train:0") == saved.of("another", None) == []
    for path in ("weights/whole", "external_weights/kept", "weights/whole/policy"):
        with pytest.raises(TinkerRefused):
            saved.find(f"tinker://{MODEL}/{path}", "me")
    with pytest.raises(TinkerRefused):
        saved.find(f"tinker://external/weights/{MODEL}", "me")
    save(saved.external, "kept")
    saved.delete("me", MODEL, "external_weights/kept")
    assert saved.find(f"tinker://{MODEL}/weights/kept", "me").name == "kept"


@pytest.mark.parametrize("checkpoint_id", ["weights/kept", "external_weights/whole"])
def test_what_is_published_is_found_by_others_and_changed_by_its_owner_alone(
    saved: SavedStates, checkpoint_id: str
) -> None:
    path = f"tinker://{MODEL}/{checkpoint_id}"
    with refusal(404):
        saved.find(path, "another")
    with refusal(404):
        saved.publish("another", MODEL, checkpoint_id, is_public=True)
    saved.publish("me", MODEL, checkpoint_id, is_public=True)
    assert saved.find(path, "another").owner == "me"
    with refusal(403):
        saved.publish("another", MODEL, checkpoint_id, is_public=False)
    with refusal(403):
        saved.set_ttl("another", MODEL, checkpoint_id, SetTtl(ttl_seconds=None))
    with refusal(403):
        saved.delete("another", MODEL, checkpoint_id)
    saved.set_ttl("me", MODEL, checkpoint_id, SetTtl(ttl_seconds=3600))
    found = saved.find(path, "another")
    assert found.is_public, "which stays"
    assert found.expires_at is not None
    assert now(3590) < found.expires_at < now(3610)
    saved.publish("me", MODEL, checkpoint_id, is_public=False)
    with refusal(404):
        saved.find(path, "another")
    assert saved.find(path, "me").expires_at == found.expires_at, "which stays"


def test_times_to_live_have_limits() -> None:
    for seconds in (None, 3600, 10 * 365 * 86400):
        check_ttl(seconds)
    for seconds in (-1, 0, 3599, 10**12):
        with refusal(400):
            check_ttl(seconds)


def parts_of(link: str) -> dict[str, str]:
    """Return the parts of a link, as the web server reads them."""
    split = urlsplit(link)
    model_id, name, file = split.path.removeprefix("/files/").replace("%3A", ":").replace("%20", " ").split("/", 2)
    query = {name: value for name, (value,) in parse_qs(split.query).items()}
    return {"model_id": model_id, "name": name, "file": file, **query}


def test_a_link_is_for_one_file_of_one_state_of_one_server(saved: SavedStates) -> None:
    found = saved.links("me", MODEL, "external_weights/whole", "http://host/")
    assert [*found["urls"]] == ["a b.safetensors"]
    parts = parts_of(found["urls"]["a b.safetensors"])
    assert saved.find_linked(**parts).read_bytes() == b"weights"
    save(saved.external, "other")
    for name, value in (("name", "other"), ("file", "b"), ("model_id", "session-2"), ("expires", "9999999999")):
        with refusal(403):
            saved.find_linked(**{**parts, name: value})
    with refusal(403):
        SavedStates(StateFolder(Path("states").absolute())).find_linked(**parts)
    with refusal(404):
        saved.links("another", MODEL, "external_weights/whole", "http://host/")
    with refusal(400):
        saved.links("me", MODEL, "weights/kept", "http://host/")
    saved.delete("me", MODEL, "external_weights/whole")
    with refusal(404):
        saved.find_linked(**parts)


def test_a_link_expires(saved: SavedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "_LINK_S", -1.0)
    (link,) = saved.links("me", MODEL, "external_weights/whole", "http://host/")["urls"].values()
    with pytest.raises(TinkerRefused, match="has expired"):
        saved.find_linked(**parts_of(link))
