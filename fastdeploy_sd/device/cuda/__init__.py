"""CUDA devices: memory, copies, events, programs."""
