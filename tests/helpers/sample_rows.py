"""Rows for the sampler: logits and parameters of every kind, on a device and in NumPy, and what may differ between the two."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from step_pair import StepPair, packed_slot

from graphrt.capture.step_buffers import StepSizes
from graphrt.kernels import abi
from graphrt.kernels.array import Array, host_array
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.cuda.sample import sample, workspace_shape
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.numpy_step import slot_view
from graphrt.kernels.sampling import gumbel_noise, keep_threshold, sample_row

LOGPROB_ERROR = 2**-18  # absolute


class Rows:
    """`count` decode rows over random slots. logits [count, vocab]; parameters by `set`."""

    def __init__(self, driver: Driver, rng: np.random.Generator, count: int, vocab: int) -> None:
        self.driver, self.rng, self.count, self.vocab = driver, rng, count, vocab
        slots = count + 2
        self.pair = StepPair(driver, StepSizes((count,), (4,), (4,), 1), slots=slots, max_blocks=1, vocab=vocab)
        self.slot_of = rng.permutation(slots)[:count].astype(np.int32)
        self.records = [np.frombuffer(packed_slot(rng, max_len=1 << 20), abi.SLOT)[0].copy() for _ in range(slots)]
        self.bias_ids = np.zeros((slots, abi.MAX_BIAS), np.int32)
        self.bias = np.zeros((slots, abi.MAX_BIAS), np.float32)
        self.counts = np.zeros((slots, vocab), np.int32)
        self.seen = np.zeros((slots, -(-vocab // 32)), np.uint32)
        self.positions = rng.integers(0, 1 << 20, count).astype(np.int32)
        self.sampled = np.arange(count, dtype=np.int32)
        self.targets = np.full(count, abi.PAD, np.int32)
        self.logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)

    def set(self, row: int, **fields: Any) -> None:
        """Parameters of the row's slot."""
        for name, value in fields.items():
            self.records[self.slot_of[row]][name] = value

    def bias_row(self, row: int, ids: NDArray[Any], values: NDArray[Any]) -> None:
        slot = self.slot_of[row]
        self.bias_ids[slot, : len(ids)], self.bias[slot, : len(ids)] = ids, values
        self.set(row, num_bias=len(ids))

    def upload(self) -> Array:
        """Everything to both sides; the device's logits."""
        pair = self.pair
        packed = np.array([np.frombuffer(r.tobytes(), np.int32) for r in self.records])
        for name, values in (
            ("slots", packed),
            ("bias_ids", self.bias_ids),
            ("bias_values", self.bias),
            ("output_counts", self.counts),
            ("prompt_seen", self.seen),
            ("positions", np.resize(self.positions, pair.host.positions.shape)),
            ("targets", np.resize(self.targets, pair.host.targets.shape)),
            ("sample_rows", np.resize(self.sampled, pair.host.sample_rows.shape)),
            ("row_slot", np.resize(self.slot_of, pair.host.row_slot.shape)),
        ):
            pair.fill(name, values)
        pair.poison(self.rng, "next_tokens", "logprob_ring", "token_ring")
        device = self.driver.alloc(self.logits.shape, np.float32)
        self.driver.upload(device, self.logits)
        return device

    def check(self, cluster: int | None = None, commit: bool = False, repeats: int = 1) -> NDArray[np.int32]:
        """Sample on both sides and compare; the tokens."""
        logits = self.upload()
        device, host = self.pair.view("decode", self.count)
        workspace = self.driver.alloc(workspace_shape(), np.uint32) if commit else None
        call = sample(self.driver, logits, device, workspace, cluster)
        self.driver.prepare([call.spec])
        before = {n: self.driver.download(getattr(self.pair.device, n)) for n in ("slots", "output_counts", "control")}
        results = []
        for _ in range(repeats):
            for name, values in before.items():
                self.driver.upload(getattr(self.pair.device, name), values)
            self.driver.launch(call)
            self.driver.synchronize()
            results.append(
                [self.driver.download(device.next_tokens).tobytes(), self.pair.device.logprob_ring.np.tobytes()]
            )
        assert all(r == results[0] for r in results), "a repeat differs"
        tokens = self.driver.download(device.next_tokens)
        NumpyOps().sample(host_array(self.logits), host)
        for i in np.flatnonzero(tokens != host.next_tokens.np):
            assert self._near_tie(int(i), int(tokens[i]), int(host.next_tokens.np[i])), (
                f"row {i} sampled {tokens[i]}, not {host.next_tokens.np[i]}: {self.records[self.slot_of[i]]}"
            )
            host.next_tokens.np[i] = tokens[i]
            print(f"row {i}: a near-tie")
        self._check_logprobs(host)
        if commit:
            NumpyOps().commit_step(host)
            self.pair.assert_equal("slots", "output_counts", "control", "token_ring")
            assert workspace is not None and not self.driver.download(workspace).any()
        return tokens

    def _check_logprobs(self, host: Any) -> None:
        """Ids and ranks bit by bit, values within LOGPROB_ERROR, everything else untouched."""
        got, want = self.pair.device.logprob_ring.np.copy(), host.logprob_ring.np
        top = abi.MAX_LOGPROBS
        count = min(top, self.vocab)
        for entry in range(got.shape[0]):
            for i in range(got.shape[1]):
                a, b = got[entry, i], want[entry, i]
                values = np.r_[0, 2 + top : 2 + top + count]
                x, y = a[values].view(np.float32), b[values].view(np.float32)
                if a[1] == b[1] and (a != b).any():
                    with np.errstate(invalid="ignore"):
                        assert ((np.abs(x - y) <= LOGPROB_ERROR + 2**-22 * np.abs(y)) | (x == y)).all(), (x, y)
                    a[values] = b[values]
                np.testing.assert_array_equal(a, b, err_msg=f"entry {entry} row {i}")

    def _near_tie(self, row: int, got: int, want: int) -> bool:
        """Whether rounding explains the difference: of the noise, or of the weight that top_p wants."""
        slot = slot_view(self.pair.view("decode", self.count)[1])[self.slot_of[row]]
        if slot["temperature"] < 1e-6:
            return False
        ops = Recorder()
        ops.sample(host_array(self.logits[row : row + 1]), _one_row(self.pair.view("decode", self.count)[1], row))
        adjusted, options = ops.seen
        position, seed = options["position"], options["seed"]
        z = adjusted / np.float32(options["temperature"])
        pair = np.array([got, want])
        noisy = z[pair] + gumbel_noise(seed, position, pair)
        limits = {"top_k": options["top_k"], "min_p": options["min_p"]}
        if z[got] >= keep_threshold(z, top_p=options["top_p"], **limits):
            return bool(abs(noisy[0] - noisy[1]) <= 2**-22 * abs(noisy[1]))
        edges = {sample_row(adjusted, **(options | {"top_p": options["top_p"] * (1 + e)})) for e in (2**-20, -(2**-20))}
        return got in edges


class Recorder(NumpyOps):
    """Keeps what the sampler was asked."""

    def _sample_row(self, raw: Any, p: Any, slot: int, position: int, b: Any) -> int:
        import graphrt.kernels.numpy_step as step

        plain = step.sample_row
        try:
            step.sample_row = lambda logits, **options: self._keep(logits, options)  # type: ignore[assignment]
            return super()._sample_row(raw, p, slot, position, b)
        finally:
            step.sample_row = plain

    def _keep(self, logits: Any, options: Any) -> int:
        self.seen = (logits, {k: v for k, v in options.items() if k != "noise"})
        return 0


def _one_row(b: Any, row: int) -> Any:
    from dataclasses import replace

    return replace(
        b,
        samples=1,
        sample_rows=b.sample_rows[row : row + 1],
        targets=b.targets[row : row + 1],
        next_tokens=host_array(np.zeros(1, np.int32)),
        logprob_ring=host_array(np.zeros((4, 1, abi.LOGPROB_WORDS), np.uint32)),
    )
