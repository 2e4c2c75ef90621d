"""From a configuration to an engine that is ready to run: sizes, memory, weights, graphs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from graphrt.backend import CPU_KV_SHARE, Backend, make_backend
from graphrt.block_pool import BlockPool, root_hash
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import CacheArray, StepBuffers
from graphrt.capture.token_ring import TokenReader
from graphrt.config import ModelConfig, load_config
from graphrt.dummy_weights import DummyCheckpoint
from graphrt.engine import Endpoint, Engine
from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError, ModelError
from graphrt.kv_spec import KVSpec
from graphrt.memory import size_text
from graphrt.models.registry import load_model, model_module
from graphrt.scheduler import Scheduler
from graphrt.seam.records import EngineInfo
from graphrt.weights import Tensors, open_checkpoint

log = logging.getLogger(__name__)


def run_engine(config: EngineConfig, endpoint: Endpoint) -> None:
    """Build the engine and serve. Raises `GraphrtError` when it cannot start."""
    build_engine(config).run(endpoint)


def build_engine(config: EngineConfig, backend: Backend | None = None) -> Engine:
    """Load the model and allocate everything. ConfigError, ModelError or DeviceError with one clear message.

    backend: what to run on, None for what `config.device` names.
    """
    config.check()
    model_dir = Path(config.model_dir)
    model_config = load_config(model_dir)
    module = model_module(model_config.architecture)
    backend = backend or make_backend(config)
    ops, sizes = backend.ops, backend.sizes
    spec = module.kv_spec(model_config, ops.kv_dtype)
    checkpoint: Tensors = DummyCheckpoint() if config.load_format == "dummy" else open_checkpoint(model_dir)
    weights_bytes = module.weight_bytes(ops, model_config, checkpoint)
    memory = backend.memory() - backend.reserve
    context, num_blocks = kv_sizes(config, model_config, spec, memory - weights_bytes, backend.kv_share)
    block_bytes, max_blocks = spec.block_bytes(config.block_tokens), -(-context // config.block_tokens)
    kv_bytes = num_blocks * block_bytes + config.max_batch * spec.slot_bytes()

    loaded = load_model(model_dir, ops, context, checkpoint=checkpoint, other_bytes=kv_bytes, memory=memory)
    caches = {
        c.name: CacheArray(
            spec.array_shape(c, blocks=num_blocks, slots=config.max_batch, block_tokens=config.block_tokens), c.dtype
        )
        for c in spec.caches
    }
    buffers = StepBuffers(
        ops, sizes, slots=config.max_batch, max_blocks=max_blocks, vocab=model_config.vocab_size, caches=caches
    )
    graphs = backend.graphs(buffers, lambda b: loaded.model.step(ops, loaded.weights, b))
    delta = DeltaWriter(buffers.delta)
    reader = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps, backend.poll)
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
        device=backend.name,
        vocab_size=model_config.vocab_size,
        context=context,
        max_batch=config.max_batch,
        max_waiting=config.max_waiting,
        block_tokens=config.block_tokens,
        num_blocks=num_blocks,
        run_ahead=backend.run_ahead if config.run_ahead is None else config.run_ahead,
        pid=os.getpid(),
    )
    return Engine(
        graphs, scheduler, delta, reader, info, root_hash(checkpoint.fingerprint(), spec.layout(config.block_tokens))
    )


def kv_sizes(
    config: EngineConfig, model: ModelConfig, spec: KVSpec, memory: int, share: float = CPU_KV_SHARE
) -> tuple[int, int]:
    """(context in tokens, number of blocks) that fit into `share` of `memory`, the bytes that the weights leave.

    ConfigError when the context asked for is longer than the model's, ModelError when the memory does not hold it.
    """
    if config.context is not None and config.context > model.max_position:
        raise ConfigError(f"--ctx {config.context}: the model's context is {model.max_position} tokens")
    tokens = config.block_tokens
    block_bytes = spec.block_bytes(tokens)
    budget = config.kv_bytes if config.kv_bytes is not None else int(max(memory, 0) * share)
    budget_blocks = max(budget - config.max_batch * spec.slot_bytes(), 0) // block_bytes
    want = config.context or model.max_position
    if budget_blocks * tokens < want:
        if config.context is not None or budget_blocks == 0:
            raise ModelError(
                f"not enough memory for a context of {want} tokens: its KV cache needs"
                f" {size_text(-(-want // tokens) * block_bytes)}, {size_text(budget)} are available;"
                + (f" --ctx {budget_blocks * tokens} would fit" if budget_blocks else " not one block fits")
            )
        log.warning("context cut from the model's %d to %d tokens: no memory for more", want, budget_blocks * tokens)
        want = budget_blocks * tokens
    # More than every slot at full length would never be used but as prefix cache.
    return want, min(budget_blocks, config.max_batch * -(-want // tokens))
