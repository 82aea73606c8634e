"""Where samples of the Tinker API are made: how many versions engines hold, and the share of each model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError
from tandem.coordinator.tinker.driving import load
from tandem.serving.tinker.placing import EqualShares

ADAPTERS = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}
NEW = {"characters": "01", "config": {"model_type": "qwen3", "num_hidden_layers": 2}}


def num_sets(most_models: int, **policy: Any) -> int:
    """Return how many versions engines are to hold."""
    whole = {"model_name": "model", "new_model": NEW, "train_micro_batch_size": 1, **policy}
    Path("tinker.yaml").write_text(yaml.safe_dump({"policy": whole, "cluster": {"trainers": 1}}))
    return load("tinker.yaml", (), most_models).policy.generation.num_adapter_sets


def test_engines_hold_several_versions_where_they_can_and_are_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert num_sets(1, **ADAPTERS) == 1
    assert num_sets(4, **ADAPTERS) == 7, "of four models, of the base, and two of which samples are being made"
    assert num_sets(4) == 1
    assert num_sets(4, **ADAPTERS, generation={"transformers_cfg": {"adapter_sets": 2}}) == 2
    assert num_sets(4, **ADAPTERS, generation={"transformers_cfg": {"adapter_sets": 1}}) == 1
    assert num_sets(4, **ADAPTERS, generation={"adapter_sets": 3}) == 3
    assert num_sets(4, **ADAPTERS, generation={"backend": "vllm"}) == 7
    assert num_sets(4, **ADAPTERS, generation={"backend": "vllm", "adapter_sets": 1}) == 1
    with pytest.raises(ConfigError, match=r"adapter_sets: 2, but no adapters are trained \(.*lora_cfg.enabled\)"):
        num_sets(2, generation={"transformers_cfg": {"adapter_sets": 2}})


def test_a_model_has_its_share_and_what_is_more_waits_in_its_order() -> None:
    shares, begun, go_on = EqualShares(4), [], asyncio.Event()

    async def take(number: int, name: str, count: int) -> None:
        async with shares.share(number, count):
            begun.append(name)
            await go_on.wait()

    async def settled() -> list[str]:
        for _ in range(10):
            await asyncio.sleep(0)
        return begun

    async def act() -> None:
        tasks = [asyncio.create_task(take(0, name, count)) for name, count in (("a", 3), ("b", 2), ("c", 1), ("d", 9))]
        tasks.append(asyncio.create_task(take(1, "other", 9)))  # more than a share, and nothing beside it
        assert await settled() == ["a", "other"]
        tasks[1].cancel()  # given up before its turn
        go_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun == ["a", "other", "c", "d"]
        assert (await asyncio.wait_for(_taken(shares), 1.0)) == "whole"

    asyncio.run(act())


def test_who_is_given_up_as_its_turn_comes_takes_nothing() -> None:
    shares = EqualShares(4)

    async def take() -> None:
        async with shares.share(0, 4):
            raise AssertionError("it was given up")

    async def all_of_them() -> str:
        async with shares.share(0, 4):
            second = asyncio.create_task(take())
            await asyncio.sleep(0)
        second.cancel()  # before it hears that its turn has come
        await asyncio.gather(second, return_exceptions=True)
        assert second.cancelled()
        return await asyncio.wait_for(_taken(shares), 1.0)

    assert asyncio.run(all_of_them()) == "whole"


async def _taken(shares: EqualShares) -> str:
    async with shares.share(0, 4):
        return "whole"
