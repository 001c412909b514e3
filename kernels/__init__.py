"""Kernels: one file per operation, its plain PyTorch reference beside its faster versions; `registry` picks."""
