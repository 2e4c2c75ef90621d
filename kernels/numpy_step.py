"""The ends of a step in NumPy: what its first kernels make of the delta record, and its last ones of the logits.

The twin of the kernels that admit, sample and commit, and what the CPU backend runs: none of it costs anything beside a step.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.arena import Arena
from graphrt.kernels.array import Array
from graphrt.kernels.ops import Ops
from graphrt.kernels.sampling import adjust_logits, gumbel_noise, sample_row, score_token
from graphrt.kernels.step_state import StepView


class NumpyStepEnds(Ops):
    """begin_step, sample, commit_step."""

    arena: Arena

    def begin_step(self, b: StepView) -> None:
        self.arena.reset()
        step = next_step(b)
        b.stamps.np[step % b.stamps.shape[0], 0] = time.perf_counter_ns()
        entry = b.delta.np[step % b.delta.shape[0]]
        if entry[0] != step:
            raise RuntimeError(f"step {step} started without its delta record (found {int(entry[0])})")
        apply_patches(entry, b)
        slots = slot_view(b)
        for slot in np.flatnonzero(slots["fresh"]):
            b.output_counts.np[slot] = 0
            slots["fresh"][slot] = 0
        tokens, positions, row_slot, samples = b.tokens.np, b.positions.np, b.row_slot.np, b.sample_rows.np
        b.targets.np[:] = abi.PAD
        if b.kind == "decode":
            wanted = b.decode_rows.np[: b.rows]
            state = slots[wanted]  # PAD reads the last slot here, and is masked below
            live = (wanted != abi.PAD) & (state["state"] == abi.SlotState.RUNNING)
            row_slot[:] = np.where(live, wanted, abi.PAD)
            tokens[:] = np.where(live, state["last_token"], 0)
            positions[:] = np.where(live, state["seq_len"], 0)
            samples[:] = np.where(live, np.arange(b.rows, dtype=np.int32), abi.PAD)
            return
        tokens[:] = b.prefill_tokens.np[: b.rows]
        positions[:] = b.prefill_positions.np[: b.rows]
        row_slot[:] = b.prefill_slots.np[: b.rows]
        samples[:] = b.prefill_samples.np[: b.samples]
        if b.kind == "score":
            b.targets.np[:] = b.score_targets.np[: b.samples]
        # Output that is computed again, after a preemption, counts as output again.
        live = row_slot != abi.PAD
        again = live & (positions >= np.where(live, slots["prompt_len"][row_slot], 0))
        np.add.at(b.output_counts.np, (row_slot[again], tokens[again]), 1)

    def sample(self, logits: Array, b: StepView) -> None:
        slots = slot_view(b)
        ring = b.logprob_ring.np[next_step(b) % b.logprob_ring.shape[0]]
        for i, row in enumerate(b.sample_rows.np):
            if row == abi.PAD or (slot := b.row_slot.np[row]) == abi.PAD:
                continue
            p, raw, target = slots[slot], logits.np[i], int(b.targets.np[i])
            if target == abi.PAD:
                target = self._sample_row(raw, p, int(slot), int(b.positions.np[row]) + 1, b)
                b.next_tokens.np[i] = target
            if p["num_logprobs"] >= 0:
                score_token(raw, target, ring[i])

    def _sample_row(self, raw: NDArray[np.float32], p: Any, slot: int, position: int, b: StepView) -> int:
        count = int(p["num_bias"])
        adjusted = adjust_logits(
            raw,
            bias_ids=b.bias_ids.np[slot, :count],
            bias=b.bias_values.np[slot, :count],
            banned=p["stop_ids"][: p["num_stop_ids"]] if position < p["min_len"] else (),
            repetition=float(p["repetition_penalty"]),
            presence=float(p["presence_penalty"]),
            frequency=float(p["frequency_penalty"]),
            seen=b.prompt_seen.np[slot],
            counts=b.output_counts.np[slot],
        )
        return sample_row(
            adjusted,
            temperature=float(p["temperature"]),
            top_k=int(p["top_k"]),
            top_p=float(p["top_p"]),
            min_p=float(p["min_p"]),
            seed=int(p["seed_lo"]) | int(p["seed_hi"]) << 32,
            position=position,
            noise=self.noise,
        )

    def noise(self, seed: int, position: int, token_ids: NDArray[Any], vocab: int) -> NDArray[np.float32]:
        """Gumbel noise of the given tokens, see `gumbel_noise`; `vocab`: an upper bound of the ids."""
        return gumbel_noise(seed, position, token_ids)

    def commit_step(self, b: StepView) -> None:
        step = next_step(b)
        slots = slot_view(b)
        entry = b.token_ring.np[step % b.token_ring.shape[0]]
        out = entry[abi.RECORD_HEADER :][: b.samples * abi.TOKEN_WORDS]
        out = out.reshape(b.samples, abi.TOKEN_WORDS).view(np.int32)
        for i, row in enumerate(b.sample_rows.np):
            if row == abi.PAD or (slot := b.row_slot.np[row]) == abi.PAD:
                out[i] = (abi.PAD, 0, 0, 0)
                continue
            s, target = slots[slot], int(b.targets.np[i])
            serial = s["serial"].view(np.int32)
            if target != abi.PAD:
                out[i] = (slot, serial, target, abi.TokenFlag.GOES_ON)
                continue
            token = int(b.next_tokens.np[i])
            length = int(b.positions.np[row]) + 2  # with the new token
            flag = abi.TokenFlag.GOES_ON
            if token in s["stop_ids"][: s["num_stop_ids"]]:
                flag = abi.TokenFlag.STOP
            elif length >= s["max_len"]:
                flag = abi.TokenFlag.LENGTH
            s["last_token"], s["seq_len"] = token, length - 1
            b.output_counts.np[slot, token] += 1
            if flag:
                s["state"] = abi.SlotState.DONE
            out[i] = (slot, serial, token, flag)
        entry[1] = b.samples
        b.control.np[0] = step
        b.stamps.np[step % b.stamps.shape[0], 1] = time.perf_counter_ns()
        entry[0] = step


def next_step(b: StepView) -> int:
    """The number of the step that runs: a 32-bit word, which wraps."""
    return (int(b.control.np[0]) + 1) & 0xFFFFFFFF


def slot_view(b: StepView) -> NDArray[Any]:
    """The slots as records [slots] of `abi.SLOT`, sharing memory."""
    return b.slots.np.view(abi.SLOT)[:, 0]


def apply_patches(entry: NDArray[np.uint32], b: StepView) -> None:
    targets = {
        abi.Field.SLOTS: b.slots,
        abi.Field.BLOCK_TABLE: b.block_table,
        abi.Field.DECODE_ROWS: b.decode_rows,
        abi.Field.PREFILL_TOKENS: b.prefill_tokens,
        abi.Field.PREFILL_POSITIONS: b.prefill_positions,
        abi.Field.PREFILL_SLOTS: b.prefill_slots,
        abi.Field.PREFILL_SAMPLES: b.prefill_samples,
        abi.Field.SCORE_TARGETS: b.score_targets,
        abi.Field.BIAS_IDS: b.bias_ids,
        abi.Field.BIAS_VALUES: b.bias_values,
        abi.Field.PROMPT_SEEN: b.prompt_seen,
    }
    at, end = abi.RECORD_HEADER, abi.RECORD_HEADER + int(entry[1])
    while at < end:
        field, offset, count = (int(w) for w in entry[at : at + abi.PATCH_HEADER])
        at += abi.PATCH_HEADER
        flat = targets[abi.Field(field)].np.reshape(-1).view(np.uint32)
        flat[offset : offset + count] = entry[at : at + count]
        at += count
