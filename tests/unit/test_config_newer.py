"""Files of a newer NeMo-RL: keys that no release known here has are ignored on request, slips of the pen never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import build_config, config_from_json, config_to_json, dump_yaml, load_config, notices, valid_part
from tandem.config.dump import fingerprint, resume_differences
from tandem.config.load import HOW_TO_IGNORE, NOT_KNOWN

NEWER = "nemo_rl_version=newer"
SMALL = """
grpo: {adv_estimator: {name: grpo}}
policy: {model_name: model}
data: {dataset_name: reasoning_gym, task: chain_sum}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)


def problems_of(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config("small.yaml", overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    "override",
    [
        "grpo.num_prompt_per_step=3",
        "grpo.max_steps=3",
        "grpo.num_generations=4",
        "grpo.temperature=1",
        "grpo.val_perido=4",
        "grpoo.seed=3",
        "loss_fn.ratio_clip_mn=0.1",
        "policy.generation.temprature=0.5",
        "policy.generation.max_tokens=5",
        "policy.max_seq_length=100",
        "policy.modelname=x",
        "policy.dtensor_cfg.tensor_paralel_size=2",
        "grpo.adv_estimator.nme=grpo",
        "env.exact_match.clas=a.B",
        "logger.log_dirr=x",
    ],
)
def test_a_slip_of_the_pen_is_an_error_with_and_without_the_flag(override: str) -> None:
    key = override.partition("=")[0].replace("grpoo.seed", "grpoo")
    without, with_flag = problems_of(override), problems_of(override, NEWER)
    assert without == with_flag
    assert len(without) == 1
    assert without[0].startswith(f"command line: {key}: unknown key; did you mean '")
    assert HOW_TO_IGNORE not in without[0], "it would not help"


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        (["grpo.length_penalty_of_gym={kind: linear}"], ('grpo.length_penalty_of_gym ({"kind": "linear"})',)),
        (["telemetry={enabled: true}"], ('telemetry ({"enabled": true})',)),
        (["policy.generation.trtllm_cfg={enabled: true}"], ('policy.generation.trtllm_cfg ({"enabled": true})',)),
        (["policy.generation.megatron_cfg={enabled: true}"], ('policy.generation.megatron_cfg ({"enabled": true})',)),
        (["cluster.gym_num_nodes=2"], ("cluster.gym_num_nodes (2)",)),
        (["policy.generation.router_port_range_low=7000"], ("policy.generation.router_port_range_low (7000)",)),
        (["policy.generation.vllm_cfg.is_mx=true"], ("policy.generation.vllm_cfg.is_mx (true)",)),
        (["grpo.adv_estimator.quorum=7"], ("grpo.adv_estimator.quorum (7)",)),
        (["env.exact_match.hyperspace=x"], ("env.exact_match.hyperspace (x)",)),
        (["grpo.quorum=null"], ("grpo.quorum (null)",)),
        (["grpo.quorum=${grpo.seed}"], ("grpo.quorum (42)",)),
        (["grpo.quorum=1", "zebra=2"], ("grpo.quorum (1)", "zebra (2)")),
        (
            ["data={dataset_name: null, task: null, train: [{dataset_name: gsm8k}, {dataset_name: gsm8k, quorum: 3}]}"],
            ("data.train[1].quorum (3)",),
        ),
        (
            ["data={dataset_name: null, task: null, train: {dataset_name: gsm8k, quorum: 3}}"],
            ("data.train.quorum (3)",),
        ),
        (["data.default={quorum: 3}"], ("data.default.quorum (3)",)),
    ],
)
def test_what_no_release_known_here_has_is_ignored_on_request(overrides: list[str], ignored: tuple[str, ...]) -> None:
    env = ["env={exact_match: {}}", *overrides]
    config = load_config("small.yaml", [*env, NEWER], to_run=False)
    assert {*config.ignored} == {f"{line} {NOT_KNOWN}" for line in ignored}
    assert notices(config)[: len(ignored)] == [*config.ignored]
    refused = problems_of(*env)
    assert len(refused) == len(ignored)
    for line in refused:
        assert "unknown key" in line
        assert line.endswith(HOW_TO_IGNORE)
        assert "--newer" in line


@pytest.mark.parametrize(
    ("version", "takes_it"),
    [
        ("'0.8'", True),
        ("0.8", True),
        ("'0.8.1'", True),
        ("'0.10'", True),
        ("newer", True),
        ("'0.7'", False),
        ("'0.3'", False),
        ("null", False),
    ],
)
def test_the_file_itself_may_say_so(version: str, takes_it: bool) -> None:
    Path("own.yaml").write_text(f"defaults: small.yaml\nnemo_rl_version: {version}\ngrpo: {{quorum: 7}}\n")
    if takes_it:
        assert load_config("own.yaml").ignored == ("grpo.quorum (7) is not known to this release: no effect",)
        return
    with pytest.raises(ConfigError, match=r"own\.yaml: grpo\.quorum: unknown key; .*--newer"):
        load_config("own.yaml")


@pytest.mark.parametrize("version", ["'nine'", "[1]", "''", "'0'"])
def test_another_version_is_refused(version: str) -> None:
    (line,) = problems_of(f"nemo_rl_version={version}")
    assert line.startswith("command line: nemo_rl_version: ")


def test_other_problems_are_found_as_ever() -> None:
    found = problems_of(NEWER, "grpo.quorum=7", "grpo.num_prompt_per_step=3", "grpo.seed=x", "policy.precision=int3")
    assert [line.split(": ")[1] for line in found] == ["grpo.num_prompt_per_step", "grpo.seed", "policy.precision"]
    config = load_config("small.yaml", [NEWER])
    assert config.ignored == ()
    assert load_config("small.yaml") != config, "the version is kept"


def test_arguments_of_megatron_core_and_teachers_are_ignored_too() -> None:
    settings: dict[str, Any] = {
        "nemo_rl_version": "0.8",
        "distillation": {"val_period": 0},
        "policy": {"model_name": "model"},
        "teachers": [{"model_name": "a"}, {"model_name": "b", "hyperspace": {"x": "${.y}", "y": 1}}],
        "data": {"dataset_name": "gsm8k"},
        "env": {"exact_match": {}},
    }
    (line,) = build_config(settings).ignored
    assert line.startswith("teachers[1].hyperspace (")


def test_what_was_ignored_stays_with_the_run() -> None:
    config = load_config("small.yaml", ["nemo_rl_version='0.8'", "grpo.quorum=a ${oc.env:HOME}", "zebra='\\${x}'"])
    assert config_from_json(config_to_json(config)) == config
    Path("resolved.yaml").write_text(dump_yaml(config))
    again = load_config("resolved.yaml")
    assert again == config
    assert again.ignored == config.ignored
    assert load_config("resolved.yaml", ["cluster.warp=9"]).ignored == (
        *config.ignored,
        f"cluster.warp (9) {NOT_KNOWN}",
    )
    plain = load_config("small.yaml")
    assert resume_differences(plain, config) == []
    assert fingerprint(plain) == fingerprint(config)


@pytest.mark.parametrize(
    ("section", "given", "ignored"),
    [
        # NeMo-RL's main branch has both, one line below the other.
        ("grpo", {"val_period": 10, "val_perioid": 3}, "grpo.val_perioid (3)"),
        ("policy.generation", {"temperature": 1.0, "temperatures": 2}, "policy.generation.temperatures (2)"),
    ],
)
def test_a_near_miss_of_a_key_in_the_same_file_is_no_slip(section: str, given: dict[str, Any], ignored: str) -> None:
    for part in reversed(section.split(".")):
        given = {part: given}
    Path("own.yaml").write_text(yaml.safe_dump({"defaults": "small.yaml", **given}))
    assert load_config("own.yaml", [NEWER]).ignored == (f"{ignored} {NOT_KNOWN}",)
    with pytest.raises(ConfigError, match=HOW_TO_IGNORE):
        load_config("own.yaml")


def test_a_near_miss_of_a_key_in_an_inherited_file_is_a_slip() -> None:
    Path("parent.yaml").write_text(yaml.safe_dump({"defaults": "small.yaml", "grpo": {"val_period": 10}}))
    Path("own.yaml").write_text(yaml.safe_dump({"defaults": "parent.yaml", "grpo": {"val_perioid": 3}}))
    with pytest.raises(ConfigError, match=r"grpo\.val_perioid: unknown key; did you mean 'val_period'\?$"):
        load_config("own.yaml", [NEWER])


@pytest.mark.parametrize(
    "override", ["grpo.val_at_strt=true", "grpo.normalize_reward=false", "grpo.val_perioid=0", "grpo.val_perido=null"]
)
def test_a_value_that_could_change_something_is_a_slip(override: str) -> None:
    assert HOW_TO_IGNORE not in problems_of(override, NEWER)[0]


@pytest.mark.parametrize(
    ("override", "meant"),
    [("grpo.val_at_strt=false", "val_at_start"), ("loss_fn.use_kl_in_rewards=null", "use_kl_in_reward")],
)
def test_a_value_that_switches_nothing_on_is_no_slip(override: str, meant: str) -> None:
    assert len(load_config("small.yaml", [override, NEWER]).ignored) == 1
    assert problems_of(override)[0].endswith(HOW_TO_IGNORE)
    section = override.partition(".")[0]
    Path("small.yaml").write_text(yaml.safe_dump({**yaml.safe_load(SMALL), section: {meant: True}}))
    assert HOW_TO_IGNORE not in problems_of(override, NEWER)[0], "it could undo what the file says"


@pytest.mark.parametrize("value", ["[]", "[attn, mlp]"])
def test_lists_of_newer_arguments_of_megatron_core_are_no_slips(value: str) -> None:
    """NeMo-RL's main branch sets `cuda_graph_modules` below `cuda_graph_impl`, in its base file."""
    overrides = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
    Path("own.yaml").write_text(
        f"defaults: small.yaml\npolicy: {{megatron_cfg: {{cuda_graph_impl: none, cuda_graph_modules: {value}}}}}\n"
    )
    config = load_config("own.yaml", [*overrides, NEWER], to_run=False)
    shown = "[]" if value == "[]" else '["attn", "mlp"]'
    assert config.ignored == (f"policy.megatron_cfg.cuda_graph_modules ({shown}) {NOT_KNOWN}",)


def test_what_another_problem_hid_is_ignored_too() -> None:
    """Megatron-Core's arguments are checked after the schema's keys."""
    overrides = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.quorum=7"]
    assert [line.split(": ")[1] for line in problems_of(NEWER, *overrides, "grpo.seed=x")] == ["grpo.seed"]


def test_a_key_that_was_not_written_is_not_told_of() -> None:
    Path("own.yaml").write_text(
        yaml.safe_dump(
            {"grpo": {"seed": "x"}, "policy": {"model_name": "model"}, "data": {"train": {"dataset_name": "gsm8k"}}}
        )
    )
    part = valid_part("own.yaml", [NEWER, "zebra=2"])
    assert part is not None
    assert part.config.ignored == (f"zebra (2) {NOT_KNOWN}",)


@pytest.mark.parametrize("value", ["true", "false"])
def test_switches_of_nemo_gym_are_no_environments(value: str) -> None:
    given = ["env.exact_match={}", f"env.should_mask_flagged_samples={value}"]
    config = load_config("small.yaml", given)
    assert [*config.env] == ["exact_match"]
    line = (
        "env.should_mask_flagged_samples (true) has no effect: samples that agents of NeMo Gym flag count as others do"
    )
    assert config.ignored == ((line,) if value == "true" else ())


def test_a_key_of_the_only_teacher_of_a_list_is_ignored_where_it_is_written() -> None:
    """NeMo-RL's main branch has `teachers[].aligner`; here the only teacher of a list is the section `teacher`."""
    settings: dict[str, Any] = {
        "nemo_rl_version": "newer",
        "distillation": {"num_prompts_per_step": 4, "val_period": 0},
        "policy": {"model_name": "model"},
        "teachers": [{"model_name": "a", "aligner": {"drop_first_assistant_chunk_kl": True}}],
        "data": {"train": {"dataset_name": "arrow_text", "data_files": "a.txt"}, "validation": None},
    }
    (line,) = build_config(settings).ignored
    assert line == f'teachers[0].aligner ({{"drop_first_assistant_chunk_kl": true}}) {NOT_KNOWN}'


@pytest.mark.parametrize(("value", "is_noted"), [("false", False), (False, False), ("every", True)])
def test_checkpoint_keys_that_moved_to_the_backend_are_no_slips(value: object, is_noted: bool) -> None:
    """NeMo-RL's main branch has `model_save_format` and `save_consolidated` in `dtensor_cfg` of its base files."""
    text = yaml.safe_dump({"model_save_format": "safetensors", "save_consolidated": value}, default_flow_style=True)
    for override in ([], [NEWER]):
        config = load_config("small.yaml", [f"policy.dtensor_cfg={text.strip()}", *override])
        assert config.ignored == ()
        assert any(line.startswith("policy.dtensor_cfg.save_consolidated") for line in notices(config)) == is_noted


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("asft: {max_num_steps: 60, kl_weight: 0.03}", "asft"),
        ("critic_pretraining: {max_num_steps: -1, val_batches: -1}", "critic_pretraining"),
        ("policy_search: {max_num_epochs: 2}", "policy_search"),
        ("data: {energon: {model_family: qwen}, train: {path: shards, split: train}}", "data.energon"),
    ],
)
def test_an_algorithm_that_is_not_built_is_never_ignored(written: str, named: str) -> None:
    """NeMo-RL's `asft.yaml` (6a79caf2) inherits `sft.yaml`: without its section, a run would do something else."""
    Path("own.yaml").write_text(f"defaults: small.yaml\n{written}\n")
    for overrides in ([], [NEWER]):
        with pytest.raises(NotSupportedYet) as caught:
            load_config("own.yaml", overrides)
        assert caught.value.problems == (f"own.yaml: not supported yet: {named}",)


def test_a_slip_of_an_algorithm_and_an_empty_section_are_no_other_algorithm() -> None:
    (line,) = problems_of("grop={max_num_steps: 3}", NEWER)
    assert line == "command line: grop: unknown key; did you mean 'grpo'?"
    assert load_config("small.yaml", ["search=null", NEWER]).ignored == (f"search (null) {NOT_KNOWN}",)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("algorithm: ppo\nppo: {ppo_epochs: 1, critic_ppo_epochs: 1}", "ppo.critic_ppo_epochs"),
        ("data: {num_workers: 4, num_packed_rows: 1}", "data.num_packed_rows"),
    ],
)
def test_a_key_that_stands_beside_an_unknown_one_is_not_the_one_meant(written: str, key: str) -> None:
    """NeMo-RL's main branch has both of each pair (afd8853d, 0bd743f3)."""
    Path("own.yaml").write_text(f"defaults: small.yaml\n{written}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("own.yaml")
    assert caught.value.problems == (f"own.yaml: {key}: unknown key{HOW_TO_IGNORE}",)
    Path("own.yaml").write_text(f"defaults: small.yaml\n{written.replace('num_workers: 4, ', '')}\n")
    if key == "data.num_packed_rows":
        with pytest.raises(ConfigError, match="num_packed_rows: unknown key; did you mean 'num_workers'"):
            load_config("own.yaml")


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("num_prompt_per_step", "num_prompts_per_step"),
        ("num_promptss_per_step", "num_prompts_per_step"),
        ("num_prompts_par_step", "num_prompts_per_step"),
        ("num_prompst_per_step", "num_prompts_per_step"),
    ],
)
def test_one_wrong_letter_names_the_key_even_where_it_stands_beside(slip: str, meant: str) -> None:
    Path("own.yaml").write_text(f"defaults: small.yaml\ngrpo: {{{slip}: 4, {meant}: 2}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config("own.yaml")
    assert caught.value.problems == (f"own.yaml: grpo.{slip}: unknown key; did you mean '{meant}'?{HOW_TO_IGNORE}",)


def test_a_section_of_variables_is_one_where_its_name_says_so() -> None:
    """NeMo-RL's `nemotron-3-ultra/mopd.yaml` (0e14faa7) names its teachers' folders once, in `_teachers`."""
    Path("own.yaml").write_text(
        "defaults: small.yaml\n_runs: {all: logs, ours: '${_runs.all}/ours'}\nlogger: {log_dir: '${_runs.ours}'}\n"
    )
    config = load_config("own.yaml")
    assert (config.logger.log_dir, config.ignored) == ("logs/ours", ())
    Path("own.yaml").write_text(Path("own.yaml").read_text().replace("_runs", "runs"))
    with pytest.raises(ConfigError, match=r"own\.yaml: runs: unknown key"):
        load_config("own.yaml")
    assert "_runs: unknown key" in problems_of("_runs={all: logs}")[0], "nothing reads it"


@pytest.mark.parametrize(
    ("override", "listed"),
    [
        ("policy.generation.backend=dllm", "megatron, sglang, transformers, vllm"),
        ("policy.generation.backend=dynamo", "megatron, sglang, transformers, vllm"),
        ("grpo.adv_estimator.name=argmaxrl", "gdpo, grpo, opd, reinforce_plus_plus"),
        ("grpo.adv_estimator.name=reinforce_baseline", "gdpo, grpo, opd, reinforce_plus_plus"),
    ],
)
def test_words_of_the_main_branch_are_no_slips(override: str, listed: str) -> None:
    """NeMo-RL's `dllm_grpo_llada_8b.yaml` (6201db4b) was asked whether it meant vllm."""
    key, _, word = override.partition("=")
    assert problems_of(override, NEWER) == (
        f"command line: {key}: '{word}' of NeMo-RL is not built: expected one of {listed}",
    )
