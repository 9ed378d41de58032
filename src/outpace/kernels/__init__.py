"""Compiled kernels for the CPU, and the team of threads that they run in. They know memory, not models."""
