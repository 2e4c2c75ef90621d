"""What was captured for a model: nodes and edges of every graph, the bytes that a step must move, and the memory that it all takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphrt.backend import cuda_backend
from graphrt.capture.cuda_graph import CudaGraphSet
from graphrt.config import load_config
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.cuda.ops import CudaOps
from graphrt.models.registry import model_module
from graphrt.weights import open_checkpoint

FAKE_SMS = 132  # multiprocessors that grids are made for on the fake device: an H200's


class GraphRow(msgspec.Struct, frozen=True):
    """One graph. bytes_weights, bytes_kv: read by one replay at least, every row at the context that was asked for."""

    kind: str
    rows: int
    nodes: int
    programmatic_edges: int
    plain_edges: int
    bytes_weights: int
    bytes_kv: int


class GraphReport(msgspec.Struct, frozen=True):
    """All graphs of a model. Memory in bytes."""

    model: str
    device: str
    context: int  # of the rows, for bytes_kv
    graphs: list[GraphRow]
    weights: int
    kv_cache: int
    step_buffers: int
    temporaries: int
    workspaces: int


def report(config: EngineConfig, context: int, *, fake: bool = False) -> tuple[GraphReport, CudaGraphSet]:
    """Capture everything and look at it. fake: on the fake device. Raises `GraphrtError` like an engine's start."""
    model_dir = Path(config.model_dir)
    backend = cuda_backend(config, FakeDriver(sm_count=FAKE_SMS, memory=1 << 40) if fake else None)
    engine = build_engine(config, backend)
    graphs, ops = engine.graphs, backend.ops
    assert isinstance(graphs, CudaGraphSet) and isinstance(ops, CudaOps)
    checkpoint, model = open_checkpoint(model_dir), load_config(model_dir)
    module = model_module(model.architecture)
    loaded = module.weight_bytes(ops, model, checkpoint)
    streamed = loaded - ops.table_bytes(model.vocab_size, model.hidden_size, model.tie_embeddings)
    per_token = module.kv_spec(model, ops.kv_dtype).block_bytes(config.block_tokens) // config.block_tokens
    rows = [
        GraphRow(
            kind,
            size,
            g.nodes,
            g.programmatic_edges,
            g.plain_edges,
            streamed,
            # Rows of one prompt share its keys: what is read at least is one sequence's.
            per_token * min(context, engine.info.context) * (size if kind == "decode" else 1),
        )
        for (kind, size), g in graphs.captured.items()
    ]
    buffers = graphs.buffers
    kv = sum(c.nbytes for c in buffers.caches.values())
    found = GraphReport(
        model=model_dir.name,
        device=backend.name,
        context=min(context, engine.info.context),
        graphs=rows,
        weights=loaded,
        kv_cache=kv,
        step_buffers=buffers.nbytes - kv,
        temporaries=ops.arena.nbytes,
        workspaces=ops.workspaces.nbytes,
    )
    return found, graphs
