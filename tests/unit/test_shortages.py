"""Errors that may not come again: a lack of disk, memory or descriptors, wherever in a chain of errors it stands."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from tandem.common.errors import CheckpointError, ConfigError, RunFolderError, is_shortage
from tandem.common.keys import FOLDER, AdmittedProcesses, write_admitted
from tandem.launch.service import describe_failure


def raised(cause: BaseException, error: Exception) -> Exception:
    """Return an error that was raised from another."""
    try:
        raise error from cause
    except Exception as found:
        return found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE, errno.ENOMEM])
def test_a_lack_is_found_behind_the_error_of_a_checkpoint_and_no_traceback_is_shown(number: int) -> None:
    why = os.strerror(number)
    error = raised(OSError(number, why), CheckpointError(f"cannot write step_3: {why}"))
    assert is_shortage(error)
    failed = describe_failure("trainer-0", 7, error, "writing step 3")
    assert not failed.expected, "another process may do better"
    assert failed.account == f"cannot write step_3: {why}"


def test_errors_of_libraries_that_name_their_reason_in_their_own_way() -> None:
    # As safetensors 0.6 and SQLite say it.
    rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert is_shortage(raised(rust, CheckpointError("cannot write")))
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert is_shortage(raised(full, RunFolderError("cannot use journal.sqlite")))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS])
def test_what_a_user_has_to_change_is_final(number: int) -> None:
    error = raised(OSError(number, os.strerror(number)), CheckpointError("cannot write"))
    assert not is_shortage(error)
    assert describe_failure("trainer-0", 7, error, "writing").expected
    assert not is_shortage(raised(Exception("no such file (os error 2)"), CheckpointError("cannot read")))
    assert not is_shortage(ConfigError("a key"))


def test_a_list_of_processes_that_cannot_be_written_is_no_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / FOLDER).symlink_to("/dev/full")  # no folder: any error of the system will do
    with pytest.raises(RunFolderError, match="cannot write the list of the run's processes"):
        write_admitted(tmp_path, AdmittedProcesses(address="tcp://127.0.0.1:1", processes={}))
