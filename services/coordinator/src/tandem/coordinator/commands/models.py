"""``coordinator merge`` and ``push``: a run's model as a plain one, and on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands

if TYPE_CHECKING:
    from tandem.observe.run_folder.found_models import FoundModel


def add_merge(commands: Commands) -> None:
    """Declare ``merge``."""
    merge = commands.add_parser(
        "merge",
        help="make a plain Hugging Face model of trained adapters",
        description="Write the model whose weights are the base's plus what the adapters add. "
        "It is loaded whole into host memory.",
    )
    merge.add_argument(
        "adapters",
        type=Path,
        metavar="ADAPTERS",
        help="a run folder, a checkpoint (step_N), or a folder in PEFT's format",
    )
    merge.add_argument("target", type=Path, metavar="FOLDER", help="where to write it; must not exist")
    merge.add_argument("--base", metavar="MODEL", help="folder or Hub name of the base (default: as ADAPTERS names it)")
    merge.set_defaults(carry_out=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from tandem.observe.run_folder.found_models import adapters_in

    (model,) = adapters_in(arguments.adapters)
    words = [str(model.folder), str(arguments.target), *([arguments.base] if arguments.base else [])]
    # In a process of its own: this one imports no torch.
    code = subprocess.run([sys.executable, "-m", "tandem.trainer.files.merging", *words], check=False).returncode
    if code == OK:
        print(f"{arguments.target} is {model.label} with its adapters merged")
    return code


def add_push(commands: Commands) -> None:
    """Declare ``push``."""
    push = commands.add_parser(
        "push",
        help="put a checkpoint's model, or its adapters, on the Hub",
        description="Make a commit on the Hub with a model's files: weights, configuration, tokenizer, chat template. "
        "HF_TOKEN is a token that may write.",
    )
    push.add_argument(
        "model", type=Path, metavar="RUN", help="a run folder, a checkpoint (step_N), or a model's folder"
    )
    push.add_argument("repo", metavar="OWNER/NAME", help="repository, made if it does not exist; @BRANCH may follow")
    push.add_argument(
        "--checkpoint", choices=("newest", "best"), default="newest", help="which one of a run (default: newest)"
    )
    push.add_argument("--message", metavar="TEXT", help="message of the commit (default: names run and step)")
    push.add_argument("--private", action="store_true", help="make a new repository that others cannot see")
    push.set_defaults(carry_out=_push)


def _push(arguments: argparse.Namespace) -> int:
    from functools import partial

    from tandem.config.models.hub_upload import parse_reference_for_push, push_model, refuse_offline

    reference = parse_reference_for_push(arguments.repo)
    model = _model(arguments.model, arguments.checkpoint)
    _check_whole(model.folder)
    refuse_offline(str(model.label))
    message = arguments.message or f"Push {model.name}"
    say = partial(print, flush=True)
    pushed = push_model(model.folder, reference, message, is_private=arguments.private, say=say)
    print(f"{model.label} is {pushed.repo}@{pushed.commit[:8]}, the newest of {pushed.revision}: {pushed.url}")
    return OK


def _model(path: Path, which: str) -> FoundModel:
    """Return the model, or the adapters, in a folder."""
    from tandem.common.errors import RunFolderError, TandemError, nearest
    from tandem.observe.run_folder.found_models import adapters_in, models_in

    if not path.is_dir():
        folders = [str(each) for each in path.absolute().parent.glob("*") if each.is_dir()]
        raise RunFolderError(f"{path}: there is no such folder{nearest(str(path.absolute()), folders)}")
    try:
        (model,) = models_in(path, "best" if which == "best" else "newest")
    except TandemError as error:
        try:
            (model,) = adapters_in(path)
        except TandemError:
            raise error from None
    return model


def _check_whole(folder: Path) -> None:
    """Raise `DamagedCheckpoint` if the files of a checkpoint are not those that were written."""
    from tandem.samples import manifest

    if (checkpoint := manifest.of_model(folder)) is not None:
        manifest.check_files(checkpoint[0], checkpoint[1].files)
