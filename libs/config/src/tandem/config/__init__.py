"""The configuration: schema, YAML files, checks, and its form on the wire.

Each name here is imported on first use: most processes of a run get their configuration by the wire, and read no file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.config.dump import config_from_json as config_from_json
    from tandem.config.dump import config_to_json as config_to_json
    from tandem.config.dump import differences as differences
    from tandem.config.dump import differing as differing
    from tandem.config.dump import dump_yaml as dump_yaml
    from tandem.config.dump import fingerprint as fingerprint
    from tandem.config.dump import make_plain as make_plain
    from tandem.config.dump import resume_differences as resume_differences
    from tandem.config.load import ChangedConfig as ChangedConfig
    from tandem.config.load import ValidPart as ValidPart
    from tandem.config.load import build_config as build_config
    from tandem.config.load import change_config as change_config
    from tandem.config.load import changed_keys as changed_keys
    from tandem.config.load import load_config as load_config
    from tandem.config.load import load_evaluation as load_evaluation
    from tandem.config.load import valid_part as valid_part
    from tandem.config.notice_rules import about_learning_rate as about_learning_rate
    from tandem.config.notice_rules import notices as notices
    from tandem.config.schema import Config as Config

_NAMES = {
    "dump": (
        "config_from_json",
        "config_to_json",
        "differences",
        "differing",
        "dump_yaml",
        "fingerprint",
        "resume_differences",
        "make_plain",
    ),
    "load": (
        "ChangedConfig",
        "ValidPart",
        "build_config",
        "change_config",
        "changed_keys",
        "load_config",
        "load_evaluation",
        "valid_part",
    ),
    "notice_rules": ("about_learning_rate", "notices"),
    "schema": ("Config",),
}
"""The public names by the module that defines them."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
