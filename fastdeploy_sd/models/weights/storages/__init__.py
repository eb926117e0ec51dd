"""The storages: how checkpoints store weights, whatever kernels multiply. One file and one registry entry each."""
