"""Transfer programs survive the wire, and nothing else passes for one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_harness import PRIVATE, simple

from tandem.common.errors import RefitError
from tandem.refit import program as programs
from tandem.refit.planner import plan
from tandem.refit.program import ProcessVerification, TransferProgram


def example() -> TransferProgram:
    tensors = {"q": ((64, 8), "float32"), "scale": ((), "float32")}
    engines = {name: simple(tensors, PRIVATE, "infer") for name in ("e0", "e1")}
    return plan({"t": simple(tensors, PRIVATE, "train")}, engines, allow_alias=False, grain=1).programs["e0"]


def test_programs_survive_the_wire() -> None:
    program = example()
    assert {transfer.round for transfer in program.receives} == {0, 1}
    assert program.sends
    assert programs.decode(programs.encode(program)) == program
    assert program.num_bytes == 64 * 8 * 4 + 4


def test_programs_are_compared_by_what_they_do() -> None:
    program = example()
    first = program.receives[0]
    moved = msgspec.structs.replace(first.copies, source_offset_C=first.copies.source_offset_C + 4)
    receives = (msgspec.structs.replace(first, copies=moved), *program.receives[1:])
    assert msgspec.structs.replace(program, receives=receives) != program
    less = ProcessVerification(program.verification.rows[:-1], program.verification.dtypes)
    assert msgspec.structs.replace(program, verification=less) != program
    assert program.verification != "something else"


def test_the_types_of_a_copy_have_names() -> None:
    planned = plan(
        {"t": simple({"q": ((4,), "float32")})}, {"e": simple({"q": ((4,), "bfloat16")}, PRIVATE)}, allow_alias=False
    )
    (transfer,) = planned.programs["e"].receives
    assert transfer.dtypes(0) == ("float32", "bfloat16")


@given(garbage=st.binary(max_size=64))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(RefitError, match="not a transfer program"):
        programs.decode(garbage)


def test_a_damaged_program_is_refused() -> None:
    encoded = programs.encode(example())
    for damaged in (encoded[:-1], encoded.replace(b"stream", b"strewn"), encoded[1:]):
        with pytest.raises(RefitError, match="not a transfer program"):
            programs.decode(damaged)


def test_nothing_to_verify() -> None:
    assert ProcessVerification(np.zeros(0, np.int64), ()) == programs.NOTHING
