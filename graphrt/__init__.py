"""graphrt: a CUDA-graph-centric, low-overhead LLM runtime in Python."""

__version__ = "0.1.0"
