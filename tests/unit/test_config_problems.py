"""Hostile files, several problems at once, and what is known of torch, of models and of paths without importing any."""

from __future__ import annotations

import importlib
import os
import sys
import types
from functools import partial
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.config import load_config, notices
from tandem.coordinator.cli import main
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.launch import preload

SMALL = """
grpo: {}
policy: {model_name: model}
data: {dataset_name: reasoning_gym, task: chain_sum}
env: {reasoning_gym: {}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def problems_of(path: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert all("\n" not in line and len(line) < 500 for line in caught.value.problems)
    return caught.value.problems


def test_every_unknown_key_and_wrong_type_is_listed() -> None:
    found = problems_of(
        "small.yaml", "grpo.sede=1", "grpo.val_period=x", "logger.log=a", "policy.generation.stop_token_ids=[a, 1, b]"
    )
    keys = [line.split(": ")[1] for line in found]
    assert keys == [
        "grpo.sede",
        "grpo.val_period",
        "policy.generation.stop_token_ids[0]",
        "policy.generation.stop_token_ids[2]",
        "logger.log",
    ]
    assert all(line.startswith("command line: ") for line in found)


def test_a_misspelt_key_that_is_required_is_one_problem() -> None:
    Path("bad.yaml").write_text("grpo: {}\npolicy: {model_nam: m}\ndata: {dataset_name: squad}\n")
    assert problems_of("bad.yaml") == ("bad.yaml: policy.model_nam: unknown key; did you mean 'model_name'?",)


def test_every_broken_rule_is_listed() -> None:
    found = problems_of(
        "small.yaml",
        "cluster.heartbeat_timeout_s=1",
        "policy.train_global_batch_size=100",
        "cluster.address=nowhere",
        "policy.new_model={config: {}, characters: ab}",
    )
    assert [line.split(": ")[1] for line in found] == [
        "policy.new_model.config.model_type",
        "policy.train_global_batch_size",
        "cluster.address",
        "cluster.heartbeat_timeout_s",
    ]


def test_the_command_line_prints_a_line_each_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "up"):
        assert main([command, "small.yaml", "grpo.sede=1", "grpo.val_period=x"]) == 2
        first, second, third, count = capsys.readouterr().err.splitlines()
        assert first == "error: command line: grpo.sede: unknown key; did you mean 'seed'?"
        assert second.startswith("error: command line: grpo.val_period: expected an integer")
        assert third.startswith("error: small.yaml: policy.model_name: 'model' does not exist")
        assert count == "3 problems"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "hostile.yaml: cannot be read: mappings or lists are nested too deeply"),
        (
            "a: " + "{a: " * 400 + "1" + "}" * 400,
            "hostile.yaml: cannot be read: mappings or lists are nested too deeply",
        ),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)),
            "hostile.yaml: line 1, column 1: not valid YAML: YAML node expansion exceeds",
        ),
        ("a: &a [*a]\n", "hostile.yaml: line 1, column 4: not valid YAML: YAML recursive aliases"),
        ("a: caf\xe9", "hostile.yaml: cannot be read: it does not hold YAML text"),
        ("3\n", "hostile.yaml: expected a mapping at the top, got a scalar"),
        ("[1, 2]\n", "hostile.yaml: expected a mapping at the top, got a list"),
        ("null: 1\n", "hostile.yaml: cannot be resolved: Incompatible key type 'NoneType'"),
        ("a: !!python/object/apply:os.system [ls]\n", "hostile.yaml: line 1, column 4: not valid YAML: could not"),
        ("grpo: {seed: " + "9" * 30 + "}\n", "hostile.yaml: grpo.seed: expected an integer at least 0"),
        ("grpo: {seed: " + "9" * 5000 + "}\n", "hostile.yaml: cannot be read: Exceeds the limit (4300 digits)"),
        ("grpo: ${sft}\nsft: ${grpo}\n", "hostile.yaml: grpo: cannot be resolved: Recursive interpolation"),
        ("grpo: {seed: '${nothing.here}'}\n", "hostile.yaml: grpo.seed: cannot be resolved: Interpolation key"),
        ("grpo: {seed: '${div:1,0}'}\n", "hostile.yaml: grpo.seed: cannot be resolved: div cannot divide 1 by 0"),
        ("defaults: " + "x" * 5000 + "\n", "hostile.yaml: defaults: there is no file xxxx"),
    ],
)
def test_hostile_files_get_a_line(text: str, expected: str) -> None:
    Path("hostile.yaml").write_bytes(text.encode("latin-1"))
    assert problems_of("hostile.yaml")[0].startswith(expected)


def test_a_recursion_error_leaves_the_limit_as_it_was() -> None:
    before = sys.getrecursionlimit()
    Path("deep.yaml").write_text("a: " + "[" * 3000 + "]" * 3000)
    problems_of("deep.yaml")
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"logger.log_dir={'x' * 300}", "cannot be a path: File name too long"),
        (f"policy.model_name={'x' * 300}", "cannot be a path: File name too long"),
        (f"prerequisite={'x' * 5000}", "cannot be a path: File name too long"),
        ('data.prompt_file="a\\0b"', "cannot be a path: embedded null byte"),
    ],
)
def test_names_that_the_file_system_cannot_have(override: str, expected: str) -> None:
    (line, *_) = problems_of("small.yaml", override)
    assert line.startswith(f"command line: {override.split('=')[0]}: ")
    assert line.endswith(expected)


def test_a_file_that_is_not_there_suggests_one_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert problems_of("smal.yaml") == ("smal.yaml: there is no such file; did you mean 'small.yaml'?",)
    Path("examples").mkdir()
    Path("examples/arithmetic.yaml").write_text(SMALL)
    assert main(["check", "arithmetik"]) == 2
    expected = "error: arithmetik: there is no such file; did you mean 'examples/arithmetic.yaml'?\n"
    assert capsys.readouterr().err == expected


KWARGS = "policy.optimizer.kwargs"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["policy.optimizer.name=torch.optim.AdamV"],
            "policy.optimizer.name: 'torch.optim.AdamV' is no Optimizer class; did you mean 'Adam",
        ),
        (["policy.optimizer.name=torch.nn.Linear"], "policy.optimizer.name: 'torch.nn.Linear' is no Optimizer class"),
        (["policy.optimizer.name=torch.optimizers.Adam"], "policy.optimizer.name: there is no module"),
        (["policy.optimizer.name=Adam"], "policy.optimizer.name: there is no module ''"),
        ([f"{KWARGS}.beta=1"], f"{KWARGS}: AdamW takes no 'beta'; did you mean 'betas'?"),
        ([f"{KWARGS}.betas=[0.9]"], f"{KWARGS}.betas: expected a list of 2 numbers, got [0.9]"),
        (
            [f"{KWARGS}.betas=[0.9, 1.0]"],
            f"{KWARGS}.betas: expected numbers at least 0 and less than 1, got [0.9, 1.0]",
        ),
        ([f"{KWARGS}.lr=-1"], f"{KWARGS}.lr: expected a number at least 0, got -1"),
        ([f"{KWARGS}.lr=fast"], f"{KWARGS}.lr: expected a number, got 'fast'"),
        (["policy.scheduler={name: torch.optim.lr_scheduler.LinearLr}"], "policy.scheduler[0].name: 'torch.optim"),
        (
            ["policy.scheduler={name: torch.optim.lr_scheduler.StepLR}"],
            "policy.scheduler[0].kwargs: StepLR needs 'step_size'",
        ),
        (
            ["policy.scheduler={name: torch.optim.lr_scheduler.ReduceLROnPlateau}"],
            "policy.scheduler[0].name: ReduceLROnPlateau needs a metric",
        ),
    ],
)
def test_optimizers_and_schedules_of_torch(overrides: list[str], expected: str) -> None:
    (line,) = problems_of("small.yaml", *overrides)
    assert line.partition(": ")[2].startswith(expected)


def test_what_torch_takes_is_taken() -> None:
    schedule = "policy.scheduler={name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 5}}"
    for name in ("SGD", "Adam", "AdamW", "NAdam", "Adafactor", "adamw.AdamW"):
        load_config("small.yaml", [schedule, f"policy.optimizer={{name: torch.optim.{name}, kwargs: {{lr: 0.1}}}}"])
    load_config("small.yaml", ["policy.optimizer={name: mine.Muon, kwargs: {anything: [1]}}"])


MODEL = "policy.new_model={config: {model_type: %s}, characters: abc}"


@pytest.mark.parametrize(
    ("model", "positions"),
    [
        ("qwen3, max_position_embeddings: 100", 100),
        ("llama", 2048),  # transformers' own default
        ("llama, max_position_embeddings: 50, rope_scaling: {rope_type: yarn, factor: 4.0}", 200),
        ("gpt2, n_positions: 90", 90),
    ],
)
def test_sequences_fit_the_positions_of_the_model(model: str, positions: int) -> None:
    length = "policy.max_total_sequence_length"
    load_config("small.yaml", [MODEL % model, f"{length}={positions}"])
    found = problems_of("small.yaml", MODEL % model, f"{length}={10**12}")
    assert f"command line: {length}: {10**12} is more than the {positions} positions of the model" in found


def test_keys_of_another_algorithm_get_a_notice() -> None:
    config = load_config("small.yaml", ["algorithm=sft", "grpo.max_num_steps=7", "grpo.seed=1"])
    assert "grpo (max_num_steps, seed) has no effect: algorithm is sft" in notices(config)
    config = load_config("small.yaml", ["algorithm=grpo", "sft.seed=3", "loss_fn.ratio_clip_min=0.1"])
    assert [line for line in notices(config) if "algorithm is" in line] == [
        "sft (seed) has no effect: algorithm is grpo"
    ]
    assert not any("algorithm is" in line for line in notices(load_config("small.yaml")))


ENV_VARS = "policy.megatron_cfg.env_vars"


def test_environment_variables_of_megatron() -> None:
    """As NeMo-RL v0.3's ``sft_openmathinstruct2_megatron.yaml`` has them."""
    Path("recipe.yaml").write_text(
        "defaults: small.yaml\n"
        "policy:\n"
        "  optimizer: null\n"
        "  megatron_cfg:\n"
        "    enabled: true\n"
        "    env_vars: {PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:False', NUMBER: 3}\n"
    )
    expected = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "NUMBER": "3"}
    assert load_config("recipe.yaml").policy.megatron_cfg.environment == expected
    assert load_config("recipe.yaml", [f"{ENV_VARS}=null"]).policy.megatron_cfg.environment == {}
    (*_, line) = notices(load_config("recipe.yaml", ["policy.megatron_cfg.enabled=false", "policy.optimizer={}"]))
    assert line.startswith(f"{ENV_VARS} ({{")
    assert line.endswith("has no effect: policy.megatron_cfg.enabled is false")
    found = problems_of("recipe.yaml", f"{ENV_VARS}={{A: true, B: [1], 'C D': x}}")
    assert found == (
        f"command line: {ENV_VARS}.A: expected text or a number, got true",
        f"command line: {ENV_VARS}.B: expected text or a number, got [1]",
        f"command line: {ENV_VARS}: 'C D' is not a valid name of a variable",
    )
    assert problems_of("recipe.yaml", f"{ENV_VARS}=[A]") == (
        f'command line: {ENV_VARS}: expected a mapping, got ["A"]',
    )


def test_what_is_imported_before_trainers_are_forked_sees_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tells.py").write_text("import os, pathlib\npathlib.Path('seen').write_text(os.environ['TANDEM_TOLD'])\n")
    monkeypatch.syspath_prepend(Path.cwd())
    module = types.ModuleType("tandem.tells.cli")

    def preload_tells() -> None:
        importlib.import_module("tells")

    module.preload = preload_tells  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tandem.tells.cli", module)
    with (
        ServiceForkServer(partial(preload, ["tells"], {"TANDEM_TOLD": "yes"}), 30.0) as fork_server,
        Path("out").open("wb") as out,
    ):  # type: ignore[list-item]
        monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
        assert fork_server.start("tandem.refit.cli", ["--help"], out).wait(120.0) == 0
    assert Path("seen").read_text() == "yes"
    assert "TANDEM_TOLD" not in os.environ
