"""Compiled CPU kernels (numba). Every one has a NumPy twin in `graphrt.kernels.ops`."""
