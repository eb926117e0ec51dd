"""This server compared with other CPU servers: the same checkpoint, prompts and threads, interleaved within one run.

Owns the peers' installation, the conversion of the checkpoint, the measurement and its report. `workers/` runs inside
the peers' own environments and imports nothing of fastdeploy_sd but in `workers/ours.py`.
"""
