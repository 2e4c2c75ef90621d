"""Llama and Qwen3: one step for prefill and decode.

Qwen3 differs by a norm on each query and key head before the rotation; biases, tied heads and the kind of rope scaling are the
configuration's. The head count, not the architecture's name, decides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphrt.config import ModelConfig
from graphrt.kernels.array import Array
from graphrt.kernels.comm import Communicator
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Ops, Rope
from graphrt.kernels.step_state import StepView
from graphrt.kv_spec import KVSpec, Paged
from graphrt.models.rope import rope_tables
from graphrt.weights import Tensors

CACHE = "kv"


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block; `o` [D, H·E] and `down` [D, F] are row-parallel."""

    attention: AttentionWeights
    o: Linear
    mlp: MlpWeights
    down: Linear
    heads: HeadShape


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model; `embed` [V, D], `head` [V, D], which may be the same values."""

    embed: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Linear
    rope: Rope
    eps: float
    scale: float
    comm: Communicator


def step(ops: Ops, w: Weights, b: StepView) -> Array:
    """The model. [rows] token ids in `b.tokens` -> logits [samples, V]."""
    heads, cache = w.layers[0].heads, b.caches[CACHE]
    x = ops.empty(b.rows, w.head.k)
    q = ops.activation(b.rows, heads.num_heads, heads.head_dim)
    attended = ops.activation(b.rows, heads.num_heads, heads.head_dim)
    hidden = ops.activation(b.rows, w.layers[0].down.k)
    logits = ops.empty(b.samples, w.head.n)

    ops.embed(b.tokens, w.embed, x)
    for layer in w.layers:
        ops.norm_qkv_rope_append(x, layer.attention, w.eps, w.rope, layer.heads, b, cache, out=q)
        ops.paged_attention(q, b, cache, layer.heads.layer, w.scale, out=attended)
        ops.linear_residual(attended, layer.o, x, w.comm)
        ops.norm_gate_up_silu(x, layer.mlp, w.eps, out=hidden)
        ops.linear_residual(hidden, layer.down, x, w.comm)
    ops.norm_head(x, b.sample_rows, w.norm, w.eps, w.head, out=logits)
    return logits


def kv_spec(config: ModelConfig, dtype: str) -> KVSpec:
    """One paged cache with a key and a value per layer and head."""
    return KVSpec((Paged(CACHE, (config.num_layers, 2, config.num_kv_heads), config.head_dim, dtype),))


def weight_bytes(ops: Ops, config: ModelConfig, checkpoint: Tensors) -> int:
    """Sum over the matrices and the embedding; norms and rope tables are not worth counting."""
    total = ops.table_bytes(config.vocab_size, config.hidden_size, config.tie_embeddings)
    for name, (n, k) in _matrices(config).items():
        total += ops.weight_bytes(n, k, checkpoint.tensor(name, (n, k)).dtype)
    return total


def load_weights(ops: Ops, config: ModelConfig, checkpoint: Tensors, context: int, comm: Communicator) -> Weights:
    """Load every tensor; `context` is the number of positions of the rope tables."""
    c, matrices = config, _matrices(config)

    def vector(name: str, n: int) -> Array:
        return ops.load_vector(checkpoint.tensor(name, (n,)))

    def linear(*names: str, bias: bool = False) -> Linear:
        parts = [checkpoint.tensor(f"{n}.weight", matrices[f"{n}.weight"]) for n in names]
        biases = (
            [checkpoint.tensor(f"{n}.bias", (p.shape[0],)) for n, p in zip(names, parts, strict=True)] if bias else None
        )
        return ops.load_linear(parts, biases)

    def layer(i: int) -> Layer:
        p, attn, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        head_norms = c.architecture == "qwen3"
        return Layer(
            attention=AttentionWeights(
                norm=vector(f"{p}.input_layernorm.weight", c.hidden_size),
                qkv=linear(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj", bias=c.attention_bias),
                q_norm=vector(f"{attn}.q_norm.weight", c.head_dim) if head_norms else None,
                k_norm=vector(f"{attn}.k_norm.weight", c.head_dim) if head_norms else None,
            ),
            o=linear(f"{attn}.o_proj", bias=c.attention_bias),
            mlp=MlpWeights(
                norm=vector(f"{p}.post_attention_layernorm.weight", c.hidden_size),
                gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=c.mlp_bias),
            ),
            down=linear(f"{mlp}.down_proj", bias=c.mlp_bias),
            heads=HeadShape(c.num_heads, c.num_kv_heads, c.head_dim, i),
        )

    cos, sin = rope_tables(c.rope, c.head_dim, context)
    embed = checkpoint.tensor("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    return Weights(
        embed=ops.load_table(embed),
        layers=tuple(layer(i) for i in range(c.num_layers)),
        norm=vector("model.norm.weight", c.hidden_size),
        head=ops.load_linear([embed]) if c.tie_embeddings else linear("lm_head"),
        rope=Rope(ops.load_vector(cos), ops.load_vector(sin)),
        eps=c.rms_eps,
        scale=float(np.float32(c.head_dim) ** np.float32(-0.5)),
        comm=comm,
    )


def _matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Names and shapes [n, k] of all matrices that steps multiply by."""
    shapes = {}
    for i in range(c.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes[f"{attn}.q_proj.weight"] = (c.num_heads * c.head_dim, c.hidden_size)
        shapes[f"{attn}.k_proj.weight"] = (c.num_kv_heads * c.head_dim, c.hidden_size)
        shapes[f"{attn}.v_proj.weight"] = (c.num_kv_heads * c.head_dim, c.hidden_size)
        shapes[f"{attn}.o_proj.weight"] = (c.hidden_size, c.num_heads * c.head_dim)
        shapes[f"{mlp}.gate_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{mlp}.up_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[f"{mlp}.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    head = "model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight"
    shapes[head] = (c.vocab_size, c.hidden_size)
    return shapes
