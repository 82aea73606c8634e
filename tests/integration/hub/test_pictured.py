"""NeMo-RL's data sets with images from a Hub on loopback: each split is read at the commit of its own repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.config import config_from_json
from tandem.observe.run_folder.journal import read_journal
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marked_in
from tandem.samples.recorded_shards import read_step
from tests.harness.hub_server import HubServer
from tests.harness.pictured_data import ASKED, PICTURES, clevr_rows, files_of, geometry_rows, refcoco_rows, write_coco
from tests.harness.runs.of_hub import coordinator_of_hub
from tests.harness.runs.running import steps_of, write_config
from tests.harness.vision_models import write_vision_model

CLEVR = ("MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "MMInstruction/Clevr_CoGenT_ValA")
FORM = {"name": "format", "weight": 0.2}


def configured(env: str, functions: list[dict[str, Any]], **data: Any) -> Path:
    """Write a configuration in the form of NeMo-RL v0.7's `vlm_grpo_3B.yaml`, and the model that it begins with."""
    if not Path("sees").exists():
        write_vision_model("qwen2_5_vl", Path("sees"))
    default = {"prompt_file": None, "processor": "vlm_hf_data_processor", "env_name": env}
    return write_config(
        {
            "grpo": {"max_num_steps": 2, "max_val_samples": 4, "num_prompts_per_step": 4},
            "policy": {
                "model_name": "sees",
                "new_model": None,
                "max_total_sequence_length": 256,
                "generation": {"max_new_tokens": 8},
            },
            "data": {"dataset_name": None, "num_train": None, "num_validation": None, "default": default, **data},
            "env": {env: {"num_workers": 2, "reward_functions": functions}},
        }
    )


def test_clevr_is_two_repositories(hub: HubServer) -> None:
    repositories = [
        hub.add(CLEVR[0], files_of(clevr_rows(12)), kind="datasets"),
        hub.add(CLEVR[1], files_of(clevr_rows(4, first=12)), kind="datasets"),
    ]
    config = configured(
        "clevr-cogent",
        [FORM, {"name": "exact_alnum", "weight": 0.8}],
        train={"dataset_name": "clevr-cogent", "split": "train"},
        validation={"dataset_name": "clevr-cogent", "split": "valA"},
    )
    ended = coordinator_of_hub("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [record.step for record in steps_of("run")][-1] == 2
    with read_journal(Path("run")) as journal:
        data = config_from_json(journal.config_json).data
    commits = [repository.branches["main"] for repository in repositories]
    assert [data.train[0].commit, data.validation[0].commit] == commits
    samples = [sample for step in (1, 2) for sample in read_step(Path("run/samples"), step)]
    assert samples
    for sample in samples:
        (image,) = marked_in(sample.question)
        assert ImageFolder(Path("run/images")).get(image.digest) == PICTURES[int(sample.answer)]
        assert 0.0 <= sample.scored.reward <= 1.0
    # Whoever reads the newer commit finds other rows.
    repositories[0].push(files_of(clevr_rows(2)))
    resumed = coordinator_of_hub("up", config, "grpo.max_num_steps=3", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    with read_journal(Path("run")) as journal:
        assert config_from_json(journal.config_json).data.train[0].commit == commits[0]


def test_geometry_and_refcoco_in_their_own_forms(hub: HubServer) -> None:
    files = files_of(geometry_rows(8), {"test": geometry_rows(4, first=8)})
    hub.add("hiyouga/geometry3k", files, kind="datasets")
    files = files_of(refcoco_rows(8), {"validation": refcoco_rows(4, first=8, split="val")})
    hub.add("jxu124/refcoco", files, kind="datasets")
    write_coco(Path("coco"), 12)
    geometry = configured(
        "geometry3k",
        [FORM, {"name": "math_expr", "weight": 0.9}],
        train={"dataset_name": "geometry3k"},
        validation={"dataset_name": "geometry3k", "split": "test"},
    )
    checked = coordinator_of_hub("check", geometry)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    boxes = {"name": "bbox_giou", "weight": 0.9, "kwargs": {"giou_penalty_thres": 0.5}}
    names = {"dataset_name": "refcoco", "download_dir": "coco"}
    refcoco = configured("refcoco", [FORM, boxes], train=names, validation={**names, "split": "validation"})
    ended = coordinator_of_hub("up", refcoco, "policy.max_total_sequence_length=512", "grpo.max_num_steps=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    samples = read_step(Path("run/samples"), 1)
    assert all(ASKED in sample.question and sample.answer.startswith("[100, 100, 500, ") for sample in samples)
