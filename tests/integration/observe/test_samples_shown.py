"""What a run records to be looked at: validation samples, the trainer's log-probabilities, and the command for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tandem.config import Config
from tandem.observe.samples import SampleQuery, recorded_steps, select, trainer_logprobs
from tandem.samples.batch import Float32s, SampleBatch
from tandem.samples.batch_sharding import scoring_trainers
from tandem.samples.sample_files import FOLDER, LOGPROBS, files
from tandem.trainer import step
from tests.harness.runs.record_harness import TWO, record_of
from tests.harness.runs.running import Command, coordinator, merged, steps_of, write_config
from tests.harness.trainers.megatron_harness import PP2, config_for, make, make_checkpoint
from tests.harness.trainers.reference import logprobs_of, sequences_of
from tests.harness.trainers.trainer_harness import make_batch, make_config, make_model, run_ranks, share_of

# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_records_what_it_was_validated_by_and_what_its_trainers_say_of_each_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = {
        "grpo": {"max_num_steps": 3, "val_period": 2, "val_at_start": True},
        "logger": {"num_val_samples_to_print": 3},
        "cluster": {"trainers": 2},
        "policy": {"train_micro_batch_size": 4},
    }
    config = write_config(merged(TWO, more))
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 1/3")
        shown = coordinator("samples", "run", "--limit", "1")  # while it goes on; step 1 may not be recorded yet
        assert shown.returncode == 0 or "has no samples" in shown.stderr, shown.stderr
        assert run.wait() == 0, run.output()
    record, folder = record_of(), Path("run") / FOLDER
    assert [*record] == recorded_steps(Path("run")) == [1, 2, 3]
    metrics = {done.step: done.metrics for done in steps_of()}
    assert recorded_steps(Path("run"), "validate") == [0, 2, 3]
    for number in (0, 2, 3):
        validated = select(Path("run"), SampleQuery(purpose="validate", step=number))
        assert [sample.scored.group for sample in validated] == [*range(8)]
        assert np.mean([sample.scored.reward for sample in validated]) == pytest.approx(metrics[number]["val_reward"])
        assert {sample.scored.newest_version for sample in validated} == {number}
        assert all(sample.advantage is None for sample in validated)
    printed = [line for line in run.output().splitlines() if line.startswith("validation: ")]
    assert len(printed) == 9, "three at a time"
    questions = [line.split(" -> ")[0] for line in printed]
    assert not {*questions[:3]} & {*questions[3:6]}
    assert not {*questions[3:6]} & {*questions[6:]}

    assert len(files(folder / LOGPROBS)) == 3 * 2, "both of the trainers that share a batch"
    for number, rows in record.items():
        said = trainer_logprobs(Path("run"), number)
        assert sorted(said) == [(row.scored.group, row.scored.sample) for row in rows]
        for row in rows:
            arrays, values_T = row.arrays, said[row.scored.group, row.scored.sample]
            assert values_T.dtype == np.float32
            assert (np.isfinite(values_T) == arrays.loss_mask_T).all(), "of what was trained on, and nothing else"
            gap = np.abs(values_T - arrays.generation_logprobs_T)[arrays.loss_mask_T]
            assert gap.max() < 1e-3, "the same weights in the same precision"
    page = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "trainer_logprobs" in code)
    exec(code.replace("12", "3"), {})
    worst = capsys.readouterr().out.splitlines()
    assert [float(line.split()[0]) for line in worst] == sorted(row.scored.reward for row in record[3])[:5]
    shown = coordinator("samples", "run", "--validation", "--step", "2", "--limit", "1")
    assert "step 2, group 0, sample 0" in shown.stdout
    assert shown.stdout.endswith("8 validation samples of step 2, 7 of them not shown: see --limit\n")
    shown = coordinator("samples", "run", "--tokens", "--limit", "1")
    lines = shown.stdout.splitlines()
    first = lines.index("tokens") + 2
    row = record[3][0]
    assert len(lines[first : lines.index("", first) - 1]) == row.scored.response_length
    assert lines[first].split()[1:3] == [str(row.arrays.token_ids_T[row.scored.prompt_length]), "2"]
    assert "gap        engine minus trainer, log-probabilities: mean absolute gap 0.000" in shown.stdout


def test_nothing_of_it_is_recorded_where_no_samples_are() -> None:
    config = write_config(merged(TWO, {"grpo": {"max_num_steps": 1, "val_period": 1}, "logger": {"samples": "off"}}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    assert not (Path("run") / FOLDER).exists()
    shown = coordinator("samples", "run")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr == "error: run/samples has no samples: logger.samples says how much is kept\n"


# --- a trainer -------------------------------------------------------------------------------------------------------


def logprobs_of_rank(rank: int, config: Config, batch: SampleBatch) -> tuple[list[int], Float32s]:
    """Train on a batch; return which trainers record, and what this one would."""
    backend = make(config)
    result = step.train(backend, *share_of(backend, batch, config), config, keeps_logprobs=True)
    assert result.logprobs is not None
    found = result.logprobs()
    assert step.train(backend, *share_of(backend, batch, config), config).logprobs is None
    backend.close()
    return scoring_trainers(config), found


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("case", ["one optimizer step", "two optimizer steps", "pipeline stages"])
def test_what_is_kept_is_what_the_model_says_before_it_is_trained(case: str, tmp_path: Path) -> None:
    batch = make_batch(8)
    if case == "pipeline stages":
        folder = make_checkpoint(tmp_path / "model", "llama")
        config, temperature = config_for(folder, 2, PP2), 0.7
    else:
        folder = make_model(tmp_path / "model")
        more: dict[str, Any] = {} if case == "one optimizer step" else {"train_global_batch_size": 4}
        config, temperature = make_config(folder, **more), 1.0
    ranks = run_ranks(config.cluster.trainers, logprobs_of_rank, config, batch)
    (recording,) = ranks[0][0]
    assert recording == len(ranks) - 1, "the last stage, which has the output layer"
    found_T = ranks[recording][1]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = [logprobs_of(model, sequence["token_ids"], temperature) for sequence in sequences_of(batch)]
    first = 0
    for length, expected_T in zip(batch.lengths_S.tolist(), expected, strict=True):
        found, counted = found_T[first : first + length], batch.valid()[first : first + length]
        assert np.isnan(found[~counted]).all()
        values = np.concatenate([[0.0], expected_T.detach().numpy()])[-length:]
        np.testing.assert_allclose(found[counted], values[counted], atol=1e-4)
        first += length


def test_the_trainers_that_record_have_the_output_layer_and_all_samples_between_them() -> None:
    def recording(trainers: int, **megatron: int) -> list[int]:
        config = make_config(Path("model"), trainers=trainers, megatron_cfg={"enabled": True, **megatron})
        return scoring_trainers(config)

    assert recording(1) == [0]
    assert recording(4) == [0, 1, 2, 3]
    assert recording(4, tensor_model_parallel_size=2) == [0, 2]
    assert recording(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2) == [4, 6]
    assert recording(8, pipeline_model_parallel_size=2, context_parallel_size=2) == [4, 6]
