"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tandem.common.files import open_replacement, replace_file


def test_a_file_has_the_old_content_until_it_has_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    replace_file(path, b"old")
    with pytest.raises(OSError, match="no space"):
        _fail_halfway(path)
    assert path.read_bytes() == b"old"
    with open_replacement(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]


def _fail_halfway(path: Path) -> None:
    with open_replacement(path) as temporary:
        temporary.write_bytes(b"half of the n")
        raise OSError("no space")


def test_what_a_killed_process_left_is_in_nobodys_way_and_no_error_leaves_more(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.with_name(f".{path.name}.{os.getpid()}").write_bytes(b"half")
    replace_file(path, b"new", is_synced=True)
    assert path.read_bytes() == b"new"
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match=r"folder\.json"):
        replace_file(tmp_path / "folder.json", b"new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.json", "folder.json"]


def test_a_private_file_is_readable_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        replace_file(tmp_path / "private", b"", is_private=True)
        replace_file(tmp_path / "public", b"")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "public")]
    assert modes == [0o600, 0o644]
