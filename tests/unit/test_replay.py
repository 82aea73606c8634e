"""What a replay begins from, which wishes are refused before anything starts, and what is said of its weights."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_harness import Run, record, samples_of_step

from tandem.common.errors import ConfigError, DamagedCheckpoint, RunFolderError, SamplesError, TandemError
from tandem.config import Config, build_config, change_config, changed_keys, config_to_json, load_config, notices
from tandem.coordinator.cli import main
from tandem.coordinator.preparing.replay import begin_replay, compare, continue_replay, origin_of, source_of
from tandem.coordinator.preparing.resuming import StartingPoint
from tandem.observe.run_folder.checkpoints import steps_in_words
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_file import RESOLVED_FROM
from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.trainers.damage import flip_bit

RUN = Path("run")


def recorded_run(steps: Collection[int] = range(1, 7), saved: range = range(2, 7, 2)) -> Run:
    """A run of six steps, with the samples of some of them."""
    run = Run(str(RUN), steps=saved)
    for step in steps:
        record(run, samples_of_step(step))
    return run


def begin(*overrides: str, from_step: int | None = None, to_step: int | None = None) -> Config:
    return begin_replay(RUN, from_step, to_step, overrides).config


def refusal(*overrides: str, kind: type[TandemError] = ConfigError, **steps: Any) -> str:
    before = sorted(Path().rglob("*"))
    with pytest.raises(kind) as raised:
        begin(*overrides, **steps)
    assert "\n" not in str(raised.value)
    assert sorted(Path().rglob("*")) == before, "nothing was begun"
    return str(raised.value)


# --- where it begins and ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "asked", "expected"),
    [
        (range(1, 7), (None, None), (0, 6)),
        (range(3, 7), (None, None), (2, 6)),
        ([1, *range(4, 7)], (None, None), (4, 6)),
        (range(1, 6), (None, None), (0, 5)),
        (range(1, 7), (4, None), (4, 6)),
        (range(1, 7), (0, 3), (0, 3)),
        ([1, 2, 3, 5, 6], (None, 3), (0, 3)),
        ([1, 2, 3, 5, 6], (2, 3), (2, 3)),
    ],
)
def test_it_begins_as_early_as_all_samples_are_there(
    recorded: Collection[int], asked: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    run = recorded_run(recorded)
    config = begin(from_step=asked[0], to_step=asked[1])
    replay = config.replay
    assert replay is not None
    assert (replay.run, replay.run_id) == ("run", run.journal.run_id)
    assert (replay.from_step, replay.to_step) == expected
    start = expected[0]
    folder = str((run.root / f"step_{start}").absolute()) if start else ""
    assert origin_of(config) == StartingPoint(first_step=start + 1, resume_from=folder)


@pytest.mark.parametrize(
    ("recorded", "asked", "complaint"),
    [
        (
            range(1, 7),
            {"from_step": 3},
            "--from 3: run has no checkpoint of that step; it can be replayed from step 2, from step 4, from the "
            "beginning; did you mean 2?",
        ),
        (
            [1, 4, 5, 6],
            {"from_step": 0},
            "--from 0: the samples of steps 2, 3 are not in run/samples, only those of steps 1, 4 to 6; it can be "
            "replayed from step 4",
        ),
        (
            range(1, 7),
            {"from_step": 6},
            "--from 6: step 6 is the last to train on; it can be replayed from step 2, from step 4, from the beginning",
        ),
        (range(1, 7), {"to_step": 9}, "--to 9: run has done 6 steps"),
        (
            range(1, 6),
            {"to_step": 6},
            "--to 6: the samples of step 6 are not in run/samples, only those of steps 1 to 5",
        ),
    ],
)
def test_an_impossible_step_is_refused_with_the_choices(
    recorded: Collection[int], asked: dict[str, int], complaint: str
) -> None:
    recorded_run(recorded)
    assert refusal(**asked) == complaint


def test_samples_that_are_missing_before_the_end_are_named() -> None:
    recorded_run([1, 2, 3, 6], saved=range(2, 3))
    assert refusal(kind=RunFolderError) == (
        "no replay of run can end with step 6: the samples of steps 4, 5 are not in run/samples, only those of steps 1 "
        "to 3, 6, and no checkpoint lies in between; --to STEP says where else to end"
    )
    replay = begin(to_step=3).replay
    assert replay is not None
    assert (replay.from_step, replay.to_step) == (0, 3)


@pytest.mark.parametrize("missing", ["a rollout's shard", "a sample", "the journal"])
def test_a_step_counts_once_it_is_done_and_every_sample_is_there(missing: str) -> None:
    run = recorded_run(range(1, 6))
    samples = samples_of_step(7 if missing == "the journal" else 6)
    if missing == "a rollout's shard":
        samples = [sample for sample in samples if sample.rollout == "rollout-0"]
    if missing == "a sample":
        samples = samples[1:]
    record(run, samples)
    replay = begin().replay
    assert replay is not None
    assert replay.to_step == 5


def test_shards_of_another_run_are_refused() -> None:
    run = recorded_run([1, 2])
    other = Run("other")
    record(other, samples_of_step(2))
    shutil.copy("other/samples/step-00000002.rollout-0.parquet", "run/samples")
    assert refusal(kind=SamplesError) == (
        f"run/samples/step-00000002.rollout-0.parquet is of the run {other.journal.run_id}, not {run.journal.run_id}"
    )


def test_the_checkpoint_to_begin_from_is_looked_at_before_anything_starts() -> None:
    run = recorded_run(range(3, 7))
    flip_bit(run.root / "step_2" / "policy" / "config.json", 3)
    assert "step_2/policy/config.json is damaged" in refusal(kind=DamagedCheckpoint)


def test_a_run_that_was_moved_is_replayed_where_it_is_now() -> None:
    recorded_run(range(3, 7))
    RUN.rename("moved")
    config = begin_replay(Path("moved"), None, None, []).config
    assert origin_of(config).resume_from == str(Path("moved/checkpoints/step_2").absolute())
    assert config.logger.log_dir == "moved-replay"


# --- which runs ------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_refused_with_those_that_there_are() -> None:
    recorded_run([1])
    with pytest.raises(RunFolderError) as raised:
        begin_replay(Path("runn"), None, None, [])
    assert str(raised.value) == "runn holds no run: there is no such folder; there are run; did you mean 'run'?"


def test_a_run_without_samples_is_refused() -> None:
    recorded_run([])
    assert refusal(kind=RunFolderError).startswith("run has recorded no samples of a finished step: see logger.samples")


def test_a_run_over_a_data_set_is_refused() -> None:
    config = build_config(
        {
            "sft": {},
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )
    Journal.create(RUN, config_to_json(config), "sft").close()
    assert refusal(kind=RunFolderError) == (
        "run is a run of sft, which generates no samples: run its configuration again instead"
    )


def begun_replay(*overrides: str, folder: str = "run-replay") -> Run:
    """A replay of all six steps that has ended."""
    config = begin(*overrides)
    replay = Run(folder, config=config)
    assert config.logger.log_dir == folder
    return replay


def test_a_replay_names_its_run() -> None:
    recorded_run()
    begun_replay()
    with pytest.raises(RunFolderError, match=r"^run-replay is a replay itself, of run: replay that$"):
        begin_replay(Path("run-replay"), None, None, [])


def test_a_replay_is_resumed_by_its_own_folder() -> None:
    run = recorded_run()
    with pytest.raises(RunFolderError, match=r"^run is not a replay: --resume takes the run folder of one$"):
        continue_replay(RUN, [])
    replay = begun_replay("loss_fn.ratio_clip_max=0.3")
    assert continue_replay(Path("run-replay"), []) == replay.config
    assert continue_replay(Path("run-replay"), ["cluster.trainers=1"]) == replay.config
    with pytest.raises(RunFolderError, match=r"; its replays: run-replay$"):
        continue_replay(RUN, [])
    run.journal.close()
    RUN.rename("aside")
    Run(str(RUN))
    with pytest.raises(
        RunFolderError, match=f"^run holds the run .*, and run-replay is a replay of {run.journal.run_id}"
    ):
        continue_replay(Path("run-replay"), [])


# --- what it changes -------------------------------------------------------------------------------------------------


def test_without_overrides_only_where_it_writes_differs() -> None:
    run = recorded_run()
    names = ("", ".run", ".run_id", ".from_step", ".to_step", ".without")
    keys = {"logger.log_dir", *(f"replay{name}" for name in names)}
    assert {*changed_keys(run.config, begin())} == keys


def test_each_replay_gets_a_folder_beside_the_run_unless_one_is_named() -> None:
    recorded_run()
    assert begin().logger.log_dir == "run-replay"
    assert begin().checkpointing.checkpoint_dir == "run-replay/checkpoints"
    Path("run-replay").mkdir()
    assert begin().logger.log_dir == "run-replay-2"
    config = begin("logger.log_dir=mine")
    assert (config.logger.log_dir, config.checkpointing.checkpoint_dir) == ("mine", "mine/checkpoints")


def test_a_run_whose_checkpoints_lie_elsewhere_keeps_them_to_itself() -> None:
    run = recorded_run()
    checkpointing = msgspec.structs.replace(run.config.checkpointing, checkpoint_dir="run/checkpoints")
    run.journal.record_config(config_to_json(msgspec.structs.replace(run.config, checkpointing=checkpointing)))
    config = begin()
    assert config.checkpointing.checkpoint_dir == "run-replay/checkpoints"
    assert refusal("checkpointing.checkpoint_dir=run/checkpoints") == (
        "checkpointing.checkpoint_dir: run/checkpoints already holds checkpoints: choose another folder"
    )


def test_a_folder_with_a_run_is_refused() -> None:
    recorded_run()
    assert refusal("logger.log_dir=run") == (
        "logger.log_dir: run already holds a run: choose another folder; a replay goes on by coordinator replay run "
        "--resume"
    )


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("policy.model_name=other", "the recorded samples are tokens of the run's own model"),
        ("policy.tokenizer.name=other", "the recorded samples are tokens of the run's own model"),
        ("policy.generation.temperature=0.5", "it changes nothing on recorded samples: nothing is generated"),
        (
            "env.reasoning_gym.timeout_s=3",
            "it changes nothing on recorded samples: their rewards are recorded with them",
        ),
        ("data.num_train=3", "it changes nothing on recorded samples: no problem is drawn"),
        ("grpo.num_prompts_per_step=4", "it decides what a step draws, which is recorded"),
        ("grpo.num_generations_per_prompt=3", "it decides what a step draws, which is recorded"),
        ("grpo.seed=3", "it decides what a step draws, which is recorded"),
        ("grpo.max_num_steps=3", "--to STEP says where a replay ends"),
        ("grpo.val_period=3", "it changes nothing on recorded samples: nothing is validated without engines"),
        ("cluster.rollouts=3", "it changes nothing on recorded samples: there are no engines"),
    ],
)
def test_what_changes_nothing_or_cannot_change_is_refused(override: str, why: str) -> None:
    recorded_run()
    assert refusal(override) == f"command line: {override.partition('=')[0]}: cannot be changed in a replay: {why}"


def test_a_value_that_stays_is_no_change() -> None:
    run = recorded_run()
    assert begin(f"grpo.seed={run.config.grpo.seed}", "policy.generation.temperature=1").replay is not None


@pytest.mark.parametrize(
    "override",
    [
        "loss_fn.ratio_clip_max=0.5",
        "policy.optimizer.kwargs.lr=1e-2",
        "policy.optimizer.name=torch.optim.Adam",
        "policy.max_grad_norm=3.5",
        "policy.train_global_batch_size=2",
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.normalize_rewards=false",
        "grpo.reward_scaling.enabled=true",
        "cluster.trainers=2",
        "policy.precision=float32",
    ],
)
def test_what_training_depends_on_may_change(override: str) -> None:
    run = recorded_run()
    extra = ["policy.train_micro_batch_size=2"] if "batch_size" in override or "trainers" in override else []
    changes = {"policy.optimizer", "policy.train_micro_batch_size"} | {override.partition("=")[0]}
    found = [
        key for key in changed_keys(run.config, begin(override, *extra)) if not key.startswith(("logger", "replay"))
    ]
    assert found
    assert any(key.startswith(tuple(changes)) for key in found)


def test_another_optimizer_begins_with_the_model() -> None:
    recorded_run()
    assert refusal("policy.optimizer.name=torch.optim.SGD", from_step=2) == (
        "command line: policy.optimizer.name: cannot be changed in a replay: the checkpoint of step 2 has the state of "
        "another optimizer; leave --from out, or give --from 0"
    )


def test_sequences_may_not_become_shorter_than_those_that_are_recorded() -> None:
    recorded_run()
    assert refusal("policy.max_total_sequence_length=4") == (
        "policy.max_total_sequence_length: 4, but the longest of the recorded samples has 5 tokens"
    )
    assert begin("policy.max_total_sequence_length=5").policy.max_total_sequence_length == 5


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    recorded_run()
    assert refusal("los_fn.ratio_clip_max=1") == "command line: los_fn: unknown key; did you mean 'loss_fn'?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--from", "3"], "error: --from 3: run has no checkpoint of that step"),
        (["run", "data.num_train=3", "env.reasoning_gym.timeout_s=3"], "2 problems"),
        (["run", "--resume", "--to", "3"], "--to STEP is set when a replay begins"),
    ],
)
def test_the_command_line_says_it_in_lines_and_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run()
    try:
        code = main(["replay", *words])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert said in capsys.readouterr().err
    assert not Path("run-replay").exists()


# --- the configuration of a run, once more ---------------------------------------------------------------------------


EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    if path.stem != "tinker"  # a client is what drives its run
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_a_resolved_configuration_without_changes_stays_as_it_is(path: Path) -> None:
    config = load_config(path, to_run=False)
    again = change_config(config, {}, [])
    assert again.config == config
    assert again.keys == ()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_there_is_nothing_to_notice_about_an_example(path: Path) -> None:
    assert notices(load_config(path, to_run=False)) == []


def test_what_followed_from_a_key_follows_from_its_new_value() -> None:
    config = build_config(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "policy": {"model_name": "model", "train_global_batch_size": 4, "train_micro_batch_size": 4},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )
    changed = change_config(config, {}, ["grpo.normalize_rewards=false", "policy.max_total_sequence_length=77"])
    assert changed.config.grpo.adv_estimator.normalize_rewards is False
    assert changed.config.policy.generation.max_new_tokens == 77
    assert changed.keys == ("grpo.normalize_rewards", "policy.max_total_sequence_length")
    assert changed_keys(config, changed.config) == [*changed.keys]


def test_megatrons_clipping_follows_the_norm_that_it_was_taken_from() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "arithmetic_megatron.yaml", to_run=False)
    changed = change_config(config, {}, ["policy.max_grad_norm=0.125"])
    assert changed.config.policy.megatron_cfg.optimizer["clip_grad"] == 0.125
    assert changed_keys(config, changed.config) == ["policy.max_grad_norm"]


def test_the_users_own_code_is_looked_for_beside_the_configuration_of_the_run() -> None:
    recorded_run()
    assert source_of(RUN) == "run/config.yaml"
    (RUN / "config.yaml").write_text(f"{RESOLVED_FROM}/somewhere/own.yaml\nalgorithm: grpo\n")
    assert source_of(RUN) == "/somewhere/own.yaml"


@pytest.mark.parametrize(
    ("steps", "words"),
    [([3], "step 3"), ([5, 1, 2, 3], "steps 1 to 3, 5"), ([2, 1], "steps 1, 2"), ([1, 3], "steps 1, 3")],
)
def test_steps_are_named_on_one_line(steps: list[int], words: str) -> None:
    assert steps_in_words(steps) == words


# --- what came of it -------------------------------------------------------------------------------------------------


def test_equal_weights_are_said_to_be_equal() -> None:
    recorded_run()
    assert compare(begun_replay().config) == "weights are equal to the bit to those of step 6 of run"


def test_other_weights_are_said_to_differ_and_why() -> None:
    run = recorded_run()
    replay = begun_replay("loss_fn.ratio_clip_max=0.5", "grpo.normalize_rewards=false")
    replay.save(4, seed=99)
    assert compare(replay.config) == (  # the last counts
        "weights are equal to the bit to those of step 6 of run, though grpo.normalize_rewards, "
        "loss_fn.ratio_clip_max were changed: no effect in these steps"
    )
    replay.save(6, seed=99)
    assert compare(replay.config) == (
        "weights differ from those of step 6 of run (those of step 2 are equal), as grpo.normalize_rewards, "
        "loss_fn.ratio_clip_max were changed"
    )
    run.save(2, seed=99)
    replay.save(4)
    assert "(those of step 4 are equal)" in compare(replay.config)


@pytest.mark.parametrize(("share", "why"), [(0.0, "no ratio was clipped"), (0.25, "no effect in these steps")])
def test_another_clip_by_which_nothing_was_clipped_is_said_to_be_one(share: float, why: str) -> None:
    recorded_run()
    replay = begun_replay("loss_fn.ratio_clip_max=0.5", "logger.page=off")
    replay.journal.forget_after(4)
    for step, clipped in ((5, 0.0), (6, share)):
        metrics = {"clip_fraction": clipped}
        replay.journal.commit_step(StepRecord(step=step, version=step, metrics=metrics, seconds={}))
    assert compare(replay.config) == (
        f"weights are equal to the bit to those of step 6 of run, though loss_fn.ratio_clip_max was changed: {why}"
    )


def test_weights_that_differ_for_no_reason_are_said_to() -> None:
    recorded_run()
    replay = begun_replay()
    replay.save(6, seed=99)
    assert compare(replay.config) == (
        "weights differ from those of step 6 of run (those of steps 2, 4 are equal), though nothing was changed"
    )


def test_on_gpus_there_is_a_reason() -> None:
    run = recorded_run()
    run.journal.forget_after(5)
    metrics = {"loss": 0.5, "memory_training_trainer_reserved_gb": 1.0}
    run.journal.commit_step(StepRecord(step=6, version=6, metrics=metrics, seconds={}))
    replay = begun_replay()
    replay.save(6, seed=99)
    assert compare(replay.config).endswith(
        "though nothing was changed: kernels of GPUs add gradients up in another order each time"
    )


def test_where_no_checkpoint_can_be_compared_losses_are() -> None:
    recorded_run(saved=range(0))
    config = begin()
    replay = Run("run-replay", config=config, steps=range(0))
    replay.journal.forget_after(4)
    replay.journal.commit_step(StepRecord(step=5, version=5, metrics={"loss": 0.5}, seconds={}))
    assert compare(config) == (
        "weights are not compared: run and this have no checkpoints of the same step; loss and gradient norm are equal "
        "in 4 of 5 steps"
    )
