"""CUDA kernels: sources (.cu, .cuh), how they are compiled and launched. Importing this needs no CUDA package."""
