"""The merging of adapters into their base as a plain Hugging Face model, for ``coordinator merge``."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tandem.common.errors import CheckpointError, ModelError, TandemError
from tandem.config.models import hf_config, hub, lora
from tandem.refit.adapters import catalogue
from tandem.samples import manifest
from tandem.trainer.files import adapter_files, policy_files

_MAX_FILE_BYTES = 5 * 10**9
_NOT_COPIED = {lora.TENSORS, lora.CONFIG, "README.md"}


def merge(adapters: Path, target: Path, base: str | None) -> None:
    """Write a model to `target` that computes the same as the base with the adapters.

    It has the base's dtypes, and the tokenizer that was saved with the adapters. Raises `TandemError`.

    Args:
        adapters: folder in PEFT's format.
        target: folder that does not exist yet. It appears whole or not at all.
        base: folder or Hub name of the base model; None for the one that the adapters name.
    """
    if target.exists():
        raise ModelError(f"{target} exists: name another folder")
    if not (adapters / lora.TENSORS).is_file():  # PEFT would look for a pickle
        raise CheckpointError(f"{adapters} has no {lora.TENSORS}")
    written = manifest.of_model(adapters)
    if written is not None:
        manifest.check_files(written[0], written[1].files)
        manifest.check_tensors(written[0], written[1].files)
    _write(adapters, target, base or adapter_files.base_of(adapters))


def _write(adapters: Path, target: Path, base: str) -> None:
    import peft
    import transformers

    source = hub.fetch_whole(base, partial(print, flush=True))
    transformers.utils.logging.disable_progress_bar()
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT imports names that transformers will drop
            described, renamed = hf_config.describe_text_part(
                hf_config.load_config(str(source), None), catalogue.read_headers(source)
            )
            model = hf_config.find_model_class(described).from_pretrained(
                source,
                config=described,
                key_mapping=renamed or None,
                dtype="auto",
                trust_remote_code=False,
                use_safetensors=True,
            )
            merged = peft.PeftModel.from_pretrained(model, str(adapters)).merge_and_unload()
            writer = policy_files.PolicyWriter(temporary, merged, _MAX_FILE_BYTES, str(source))
            tensors = {**dict(merged.named_parameters()), **policy_files.saved_buffers(merged)}  # tied ones once
            writer.add(policy_files.convert_names(merged, {name: each.detach() for name, each in tensors.items()}))
            writer.finish()
        for path in sorted(adapters.iterdir()):
            if path.name not in _NOT_COPIED:
                shutil.copy2(path, temporary)
        temporary.rename(target)
    except Exception as error:  # the libraries pass on any error of their readers
        raise ModelError(f"{adapters} cannot be merged into {base}: {error}".split("\n")[0]) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Merge the adapters in a folder into a second folder. A third word names the base. Return the exit code."""
    adapters, target, *base = argv
    try:
        merge(Path(adapters), Path(target), base[0] if base else None)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
