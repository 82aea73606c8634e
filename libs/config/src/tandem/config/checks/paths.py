"""Rules for the names of files and folders; whether they exist is checked later."""

from __future__ import annotations

from pathlib import Path

from tandem.config.checks.rule import Rule
from tandem.config.problem import InvalidValue, ProblemCollector, shown
from tandem.config.schema import Config


def explain_no_path(path: str | Path) -> str | None:
    """Return why no file or folder can have this name; None if one can."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a null byte
        return str(error)
    return None


def check_paths_are_valid(config: Config) -> None:
    """Check that paths are valid, and not too long for the file system, for example."""
    data, template, problems = config.data, config.policy.tokenizer.chat_template, ProblemCollector()
    paths = {
        "policy.model_name": config.policy.model_name,
        "policy.tokenizer.name": config.policy.tokenizer.name,
        "policy.tokenizer.chat_template": template if (template or "").endswith(".jinja") else None,
        "prerequisite": config.prerequisite,
        "logger.log_dir": config.logger.log_dir,
        "checkpointing.checkpoint_dir": config.checkpointing.checkpoint_dir,
        "data.train_data_path": data.train_data_path,
        "data.val_data_path": data.val_data_path,
        "data.prompt_file": data.prompt_file,
        "data.system_prompt_file": data.system_prompt_file,
        **{f"env.{name}.model_name": entry.model_name for name, entry in config.env.items()},
    }
    for key, path in paths.items():
        if path is not None and (problem := explain_no_path(path)) is not None:
            problems.found.append(InvalidValue(key, f"{shown(path)} cannot be a path: {problem}"))
    problems.complain()


RULES: tuple[Rule, ...] = (check_paths_are_valid,)
