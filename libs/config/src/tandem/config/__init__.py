"""The configuration: schema, YAML files, checks, and its form on the wire."""

from __future__ import annotations

from tandem.config.dump import (
    config_from_json,
    config_to_json,
    differences,
    differing,
    dump_yaml,
    fingerprint,
    resume_differences,
    to_plain,
)
from tandem.config.load import (
    Changed,
    ValidPart,
    build_config,
    change_config,
    changed_keys,
    load_config,
    load_evaluation,
    valid_part,
)
from tandem.config.notices import about_learning_rate, notices
from tandem.config.schema import Config

__all__ = [
    "Changed",
    "Config",
    "ValidPart",
    "about_learning_rate",
    "build_config",
    "change_config",
    "changed_keys",
    "config_from_json",
    "config_to_json",
    "differences",
    "differing",
    "dump_yaml",
    "fingerprint",
    "load_config",
    "load_evaluation",
    "notices",
    "resume_differences",
    "to_plain",
    "valid_part",
]
