"""From a step to a graph: static buffers, delta records, token ring, replay. Knows no HTTP."""
