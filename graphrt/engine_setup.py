"""From a configuration to an engine that is ready to run: sizes, memory, weights, graphs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from graphrt.block_pool import BlockPool, root_hash
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.graph import CpuStepGraph, GraphSet
from graphrt.capture.step_buffers import CacheArray, StepBuffers, StepSizes
from graphrt.capture.token_ring import TokenReader
from graphrt.config import ModelConfig, load_config
from graphrt.engine import Endpoint, Engine
from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError, DeviceError, ModelError
from graphrt.kernels.cpu_ops import make_cpu_ops
from graphrt.kv_spec import KVSpec
from graphrt.memory import available_memory
from graphrt.models.registry import load_model, model_module
from graphrt.scheduler import Scheduler
from graphrt.seam.records import EngineInfo
from graphrt.weights import open_checkpoint

log = logging.getLogger(__name__)

KV_SHARE = 0.5  # of the memory left beside the weights, when neither --ctx nor --kv-memory says more


def run_engine(config: EngineConfig, endpoint: Endpoint) -> None:
    """Build the engine and serve. Raises `GraphrtError` when it cannot start."""
    build_engine(config).run(endpoint)


def cpu_sizes(max_batch: int, prefill_chunk: int) -> StepSizes:
    """Sizes for the CPU, where a graph costs nothing: fine steps keep padding small."""
    decode = [n for n in (1, 2, 4, 6, *range(8, max_batch, 4)) if n < max_batch]
    prefill = [n for n in (1, 2, 4, 8, *range(16, prefill_chunk, 16)) if n < prefill_chunk]
    score = [n for n in (8, 32) if n < prefill_chunk]  # few: their logits are large
    return StepSizes(
        (*decode, max_batch), (*prefill, prefill_chunk), tuple(score) or (prefill_chunk,), min(8, max_batch)
    )


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and allocate everything. ConfigError, ModelError or DeviceError with one clear message."""
    config.check()
    if config.device == "cuda":
        raise DeviceError("--device cuda: this version has no CUDA backend; use --device cpu")
    model_dir = Path(config.model_dir)
    model_config = load_config(model_dir)
    module = model_module(model_config.architecture)
    ops = make_cpu_ops(config.threads)
    spec = module.kv_spec(model_config, ops.kv_dtype)
    weights_bytes = module.weight_bytes(ops, model_config, checkpoint := open_checkpoint(model_dir))
    context, num_blocks = kv_sizes(config, model_config, spec, available_memory() - weights_bytes)
    block_bytes, max_blocks = spec.block_bytes(config.block_tokens), -(-context // config.block_tokens)
    kv_bytes = num_blocks * block_bytes + config.max_batch * spec.slot_bytes()

    loaded = load_model(model_dir, ops, context, other_bytes=kv_bytes)
    caches = {
        c.name: CacheArray(
            spec.array_shape(c, blocks=num_blocks, slots=config.max_batch, block_tokens=config.block_tokens), c.dtype
        )
        for c in spec.caches
    }
    sizes = cpu_sizes(config.max_batch, config.prefill_chunk)
    buffers = StepBuffers(
        ops, sizes, slots=config.max_batch, max_blocks=max_blocks, vocab=model_config.vocab_size, caches=caches
    )
    graphs = GraphSet(
        ops, buffers, lambda view: CpuStepGraph(ops, lambda b: loaded.model.step(ops, loaded.weights, b), view)
    )
    delta, reader = DeltaWriter(buffers.delta), TokenReader(buffers.token_ring, buffers.logprob_ring)
    scheduler = Scheduler(
        delta,
        BlockPool(num_blocks),
        sizes,
        slots=config.max_batch,
        max_blocks=max_blocks,
        block_tokens=config.block_tokens,
        vocab=model_config.vocab_size,
        reuse_prefixes=spec.prefix_reusable,
    )
    info = EngineInfo(
        architecture=model_config.architecture,
        device=f"cpu ({ops.name})",
        vocab_size=model_config.vocab_size,
        context=context,
        max_batch=config.max_batch,
        max_waiting=config.max_waiting,
        block_tokens=config.block_tokens,
        num_blocks=num_blocks,
        run_ahead=config.run_ahead or 0,  # a launch on the CPU is the step itself: running ahead only wastes steps
        pid=os.getpid(),
    )
    return Engine(
        graphs, scheduler, delta, reader, info, root_hash(checkpoint.fingerprint(), spec.layout(config.block_tokens))
    )


def kv_sizes(config: EngineConfig, model: ModelConfig, spec: KVSpec, memory: int) -> tuple[int, int]:
    """(context in tokens, number of blocks) that fit into `memory` bytes beside the weights.

    ConfigError when the context asked for is longer than the model's, ModelError when the memory does not hold it.
    """
    if config.context is not None and config.context > model.max_position:
        raise ConfigError(f"--ctx {config.context}: the model's context is {model.max_position} tokens")
    tokens = config.block_tokens
    block_bytes = spec.block_bytes(tokens)
    budget = config.kv_bytes if config.kv_bytes is not None else int(max(memory, 0) * KV_SHARE)
    budget_blocks = max(budget - config.max_batch * spec.slot_bytes(), 0) // block_bytes
    want = config.context or model.max_position
    if budget_blocks * tokens < want:
        if config.context is not None or budget_blocks == 0:
            raise ModelError(
                f"not enough memory for a context of {want} tokens: its KV cache needs"
                f" {-(-want // tokens) * block_bytes / 2**30:.2f} GiB, {budget / 2**30:.2f} GiB are available;"
                + (f" --ctx {budget_blocks * tokens} would fit" if budget_blocks else " not one block fits")
            )
        log.warning("context cut from the model's %d to %d tokens: no memory for more", want, budget_blocks * tokens)
        want = budget_blocks * tokens
    # More than every slot at full length would never be used but as prefix cache.
    return want, min(budget_blocks, config.max_batch * -(-want // tokens))
