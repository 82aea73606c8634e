"""Break one rule at a time in a copy of the sources, and show that the test which protects it fails.

``python scripts/defects.py`` tries them all, ``python scripts/defects.py NAME...`` some. When tests are made faster, a
defect that is no longer caught says what they no longer protect. A defect is a few characters of the sources, found
wherever they lie, so that files may move; `tests/unit/test_defects.py` looks whether each is still there, and once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 900
_NOTHING_RAN = 5
"""The last of pytest's own exit codes. Those above are of a test that ended its process, which members of a run do."""


class Defect(NamedTuple):
    """A rule that is broken, and the test that fails then."""

    name: str
    before: str
    """What stands once in the sources."""
    after: str
    test: str
    """As pytest takes it, from the root."""
    only: str = ""
    """Which cases of the test, as `-k` takes it."""


DEFECTS = (
    Defect(
        "all logits of a row exist at once",
        "return max(1, num_logits // num_rows)",
        "return max(1, num_tokens)",
        "tests/integration/trainer/test_large_tensors.py::test_logits_never_all_exist",
        "recomputed",
    ),
    Defect(
        "each block of queries keeps a mask of its own",
        "num_missing : num_missing + seen.stop - seen.start]",
        "num_missing : num_missing + seen.stop - seen.start].clone()",
        "tests/unit/test_segments.py::test_a_long_sequence_keeps_no_scores_and_one_mask",
    ),
    Defect(
        "the list of members is believed though others may have changed it",
        "if mode & 0o077:",
        "if mode & 0o007:",
        "tests/protocol/test_orphans.py::test_the_list_of_members_is_its_owners_alone_and_is_not_believed_otherwise",
    ),
    Defect(
        "a member that was shut out is heard over the connection that it has",
        "if peer.key in self._admitted:",
        "if peer.key:",
        "tests/protocol/test_members_only.py::test_who_is_shut_out_is_not_heard_over_the_connection_that_it_has",
    ),
    Defect(
        "a process of an older protocol joins",
        "if probe.protocol_version != PROTOCOL_VERSION:",
        "if probe.protocol_version > 10**9:",
        "tests/protocol/test_wire.py::test_another_version_is_told_both",
    ),
    Defect(
        "a command that comes twice is carried out twice",
        "if command.command_id in self._answered:",
        "if command.command_id in ():",
        "tests/protocol/test_wire.py::test_a_command_that_comes_twice_is_carried_out_once",
    ),
    Defect(
        "a service outlives the coordinator that launched it",
        "        die_with(launched_by)\n",
        "        pass\n",
        "tests/integration/runs/test_losses.py::test_kill_9_of_the_coordinator_leaves_nothing",
    ),
    Defect(
        "what a killed process has lost while it exits outlives it",
        "if os.getppid() == owner and not _is_exiting(owner):",
        "if os.getppid() == owner:",
        "tests/unit/test_process_lifetime.py::test_what_an_exiting_owner_has_lost_already_ends_with_it",
    ),
    Defect(
        "what an environment's threads have just started outlives a killed rollout",
        "        be_named_by_descendants()\n",
        "",
        "tests/unit/test_reward_workers.py::test_nothing_outlives_a_rollout_process_that_is_killed",
        "InThreads",
    ),
    Defect(
        "only the tokenizer's end of a sequence ends a response",
        "stop_ids = [eos_id, *(token for folder in folders for token in _file_ends(folder))]",
        "stop_ids = [eos_id]",
        "tests/unit/test_turn_ends.py::test_a_response_ends_where_tokenizer_generation_config_or_template_says",
    ),
    Defect(
        "a turn of weight 0 is learned",
        'messages[turn.message].get("weight") != 0',
        'messages[turn.message].get("weight") != 2',
        "tests/unit/test_turn_ends.py::test_of_each_turn_the_same_is_learned",
    ),
    Defect(
        "a generated marker of the next turn is written again",
        "was_ended = last_id == self._undivided[end] or",
        "was_ended =",
        "tests/unit/test_turn_ends.py::test_a_marker_of_the_next_turn_ends_a_turn_where_generation_stops_at_it",
    ),
    Defect(
        "samples go to another run's trainers",
        "if request.run_id != self._run_id:",
        "if request.run_id == '':",
        "tests/unit/test_sample_store.py::test_it_gives_to_its_own_run_alone_and_no_more_than_is_meant_to_be_asked_for",
    ),
    Defect(
        "a sample that comes again replaces the one that was given out",
        "if (group, sample) in samples:",
        "if (group, sample) in ():",
        "tests/unit/test_sample_store.py::test_a_sample_that_comes_again_stays_as_it_was",
    ),
    Defect(
        "samples are trained on before they are on disk",
        "        self._await_record()\n",
        "",
        "tests/unit/test_sample_recorder.py::test_what_trainers_have_fetched_is_on_disk",
    ),
    Defect(
        "a step is trained on weights that nobody has proven",
        "version < engine.version or engine.is_verified\n",
        "version <= engine.version\n",
        "tests/unit/test_scheduler_ages.py::test_every_step_is_done_once_with_samples_that_are_young_enough",
    ),
    Defect(
        "an engine that is lost takes the groups that it had with it",
        "        actions += put_back(tables, groups)\n",
        "",
        "tests/unit/test_scheduler.py::"
        "test_an_engine_lost_while_generating_is_replaced_and_its_groups_are_generated_again",
    ),
    Defect(
        "a rule is not asked again when a table that it reads has changed",
        "reads=(RuleTables.READY, RuleTables.ENGINES, RuleTables.WEIGHTS, RuleTables.JOINING),",
        "reads=(RuleTables.READY, RuleTables.WEIGHTS, RuleTables.JOINING),",
        "tests/unit/test_scheduler_agenda.py::test_checking_the_agenda_changes_nothing",
    ),
    Defect(
        "a metric that is no number is taken for one",
        'require(math.isfinite(value), f"metrics[{name!r}]"',
        'require(True, f"metrics[{name!r}]"',
        "tests/unit/test_replies.py::test_an_answer_that_cannot_be_is_one_line",
    ),
    Defect(
        "the step that a run goes on from is superseded as well",
        'SET superseded_at = ? WHERE step > ? AND superseded_at IS NULL", (now, step)',
        'SET superseded_at = ? WHERE step >= ? AND superseded_at IS NULL", (now, step)',
        "tests/unit/test_journal.py::test_a_step_that_is_done_over_again_is_superseded_not_lost",
    ),
    Defect(
        "a checkpoint that lacks a file is loaded",
        "if num_read < box.num_elements:",
        "if num_read < 0:",
        "tests/integration/trainer/test_checkpoints.py::test_a_damaged_checkpoint_is_refused",
        "last",
    ),
    Defect(
        "a flipped bit in a checkpoint is not seen",
        "!= span.digest:\n",
        "== '':\n",
        "tests/unit/test_manifest.py::test_a_flipped_bit_is_found_by_exactly_one_of_those_that_share",
    ),
    Defect(
        "the digest of a tensor does not depend on which it is",
        'combine(total * terms.salt(name, global_shape, str(values.dtype).removeprefix("torch.")))',
        "combine(total)",
        "tests/unit/test_digest.py::test_swapped_and_stale_tensors_change_it",
    ),
    Defect(
        "PPO takes the larger of two gains",
        "loss_BT = torch.maximum(unclipped_BT, clipped_BT)",
        "loss_BT = torch.minimum(unclipped_BT, clipped_BT)",
        "tests/unit/test_loss.py::test_the_clip_has_a_lower_and_an_upper_bound",
    ),
    Defect(
        "CISPO's weight has a gradient",
        "-advantages_BT * within_BT.detach() * logprobs_BT",
        "-advantages_BT * within_BT * logprobs_BT",
        "tests/unit/test_loss_options.py::test_cispo_weights_the_policy_gradient_by_the_clipped_ratio",
    ),
    Defect(
        "a page of another site may ask a server on loopback",
        "if origin is not None and not is_loopback(_host(origin)):",
        "if origin == '':",
        "tests/unit/test_web.py::test_a_server_on_loopback_without_a_token_answers_no_web_site",
    ),
    Defect(
        "a reward worker's descendants are left",
        "    end_descendants()\n    if watches",
        "    if watches",
        "tests/unit/test_reward_workers.py::test_a_worker_that_is_killed_takes_all_that_it_has_started_along",
    ),
    Defect(
        "samples of two models share the keys and values of one prompt",
        "return (*super()._shared_by(request), version_of(request))",
        "return super()._shared_by(request)",
        "tests/unit/test_adapters_engine.py::test_requests_of_several_versions_in_one_batch_are_those_of_each_alone",
    ),
    Defect(
        "adapters that have changed in memory are still computed with",
        "if digests != again.digests and self._held.get(version_again) is again:",
        "if self._held.get(version_again) is None:",
        "tests/unit/test_adapters_engine.py::test_each_version_has_the_trainers_digests_and_a_damaged_one_is_dropped",
    ),
    Defect(
        "a model with many requests has all places of an engine",
        "waiting = _take_turns(waiting, running)",
        "waiting = [*waiting]",
        "tests/unit/test_adapters_engine.py::test_versions_have_equal_shares_of_the_places_and_a_broken_one_is_told",
    ),
    Defect(
        "what a lost trainer has taken along is recorded as if it had been done",
        "if attempt == self.attempt:",
        "if attempt <= self.attempt:",
        "tests/unit/test_tinker_record.py::test_what_a_lost_trainer_has_taken_along_is_not_recorded",
    ),
    Defect(
        "a frame of calls is believed as it is read",
        "if not is_right or xxhash.xxh3_64_intdigest(message) != digest:",
        "if not is_right:",
        "tests/unit/test_tinker_record.py::test_no_bit_changes_unnoticed",
    ),
    Defect(
        "a full record loses what is being trained",
        "if each not in self._files and each != model), None)",
        "if each != model), None)",
        "tests/unit/test_tinker_record.py::test_the_record_of_a_model_that_is_trained_is_not_deleted",
    ),
    Defect(
        "whoever may load a published state may delete it",
        "_, folder = self.find_own(path, owner)",
        "_, folder = self.find(path, owner)",
        "tests/unit/test_tinker_checkpoints.py::test_what_is_published_is_found_by_others_and_changed_by_its_owner_alone",
    ),
    Defect(
        "a link is for any file",
        'expected = self._signature(f"{model_id}/{name}/{file}", expires)',
        'expected = self._signature(f"{model_id}/{name}/a b.safetensors", expires)',
        "tests/unit/test_tinker_checkpoints.py::test_a_link_is_for_one_file_of_one_state_of_one_server",
    ),
)


def sources(root: Path = ROOT) -> list[Path]:
    """Return the files that defects are made in."""
    return sorted(path for part in ("libs", "services") for path in (root / part).rglob("*.py"))


def places(defect: Defect, texts: dict[Path, str]) -> list[Path]:
    """Return the file of a defect, as often as it can be made there."""
    return [path for path, text in texts.items() for _ in range(text.count(defect.before))]


def _copied(to: Path) -> None:
    """Copy what git would keep."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def _run(copy: Path, tests: Iterable[str], only: str = "") -> tuple[int, str]:
    """Run tests on a copy; return the exit code of pytest and what it printed."""
    paths = [str(path) for path in (*copy.glob("libs/*/src"), *copy.glob("services/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *(["-k", only] if only else []), *tests]
    ended = subprocess.run(
        words, cwd=copy, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def tried(defects: Iterable[Defect], copy: Path, *, is_right_checked: bool = True) -> Iterator[tuple[Defect, str]]:
    """Make one defect after another in a copy; yield with each why it is not caught, empty if it is."""
    texts = {path: path.read_text() for path in sources(copy)}
    for defect in defects:
        found = places(defect, texts)
        if len(found) != 1:
            yield defect, f"it can be made in {len(found)} places"
            continue
        if is_right_checked and (right := _run(copy, [defect.test], defect.only))[0] != 0:
            yield defect, f"its test fails without it:\n{right[1]}"
            continue
        (path,) = found
        path.write_text(texts[path].replace(defect.before, defect.after))
        try:
            code, said = _run(copy, [defect.test], defect.only)
        finally:
            path.write_text(texts[path])
        yield defect, "" if code == 1 or code > _NOTHING_RAN else f"pytest ended with {code}:\n{said}"


def main() -> int:
    """Try defects; return how many are not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words of their names (default: all)")
    parser.add_argument("--broken-only", action="store_true", help="do not run the tests on what is right as well")
    given = parser.parse_args()
    chosen = [each for each in DEFECTS if not given.names or any(word in each.name for word in given.names)]
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="defects-") as folder:
        _copied(Path(folder))
        began = time.monotonic()
        for defect, why in tried(chosen, Path(folder), is_right_checked=not given.broken_only):
            num_missed += bool(why)
            print(f"{'MISSED' if why else 'caught'} {time.monotonic() - began:6.1f} s  {defect.name}", flush=True)
            print(why or f"         by {defect.test}", flush=True)
            began = time.monotonic()
    print(f"{len(chosen) - num_missed} of {len(chosen)} defects are caught")
    return num_missed


if __name__ == "__main__":
    sys.exit(main())
