"""abi.cuh says what kernels/abi.py says."""

from __future__ import annotations

import re

from graphrt.kernels import abi
from graphrt.kernels.cuda import begin_step
from graphrt.kernels.cuda.jit import SOURCES


def constants() -> dict[str, int]:
    """Every `constexpr int` of abi.cuh that is a plain number."""
    text = re.sub(r"//.*", "", (SOURCES / "abi.cuh").read_text())
    statements = re.findall(r"constexpr int ([^;]*);", text)
    return {name: int(value) for s in statements for name, value in re.findall(r"(\w+) = (-?\d+)\b(?! *[-+*/])", s)}


def test_words_of_a_slot() -> None:
    found = {name.removeprefix("SLOT_").lower(): v for name, v in constants().items() if name.startswith("SLOT_")}
    assert found.pop("words") == abi.SLOT_WORDS
    assert abi.SLOT.fields is not None
    declared = {name: offset // 4 for name, (_, offset) in abi.SLOT.fields.items() if name != "spare"}
    assert found == declared


def test_sizes_and_codes() -> None:
    c = constants()
    for name in ("MAX_STOP_IDS", "MAX_BIAS", "MAX_LOGPROBS", "PATCH_HEADER", "RECORD_HEADER", "TOKEN_WORDS"):
        assert c[name] == getattr(abi, name), name
    assert (c["STATE_RUNNING"], c["STATE_DONE"]) == (abi.SlotState.RUNNING, abi.SlotState.DONE)
    assert (c["FLAG_GOES_ON"], c["FLAG_STOP"], c["FLAG_LENGTH"]) == tuple(abi.TokenFlag)
    assert "2 + 2 * MAX_LOGPROBS" in (SOURCES / "abi.cuh").read_text() and abi.LOGPROB_WORDS == 2 + 2 * abi.MAX_LOGPROBS
    assert (c["CONTROL_ERROR"], c["CONTROL_FOUND"]) == (begin_step.CONTROL_ERROR, begin_step.CONTROL_FOUND)


def test_fields_in_the_order_of_their_numbers() -> None:
    assert [f.name.lower() for f in abi.Field] == list(begin_step.FIELDS) and constants()["FIELDS"] == len(abi.Field)
    source = (SOURCES / "begin_step.cu").read_text()
    listed = re.search(r"all\[FIELDS\] = \{([^}]*)\}", source)
    assert listed and [name.strip() for name in listed[1].split(",")] == list(begin_step.FIELDS)
