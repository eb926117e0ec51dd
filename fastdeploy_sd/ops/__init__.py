"""The ops: a module per group, with each op's declaration and a Python function that says what it does.

An Op runs on NumPy arrays and on Paddle tensors alike and can be recorded; a HostOp belongs to the host's side of a
step and runs on NumPy arrays. Every op raises ValueError, with its name and the argument's, where a shape, a dtype, an
offset or a length disagrees or a parameter is out of its range. Activations are float32 or bfloat16, and on a GPU
float16 too: a processor's kernels refuse that with a ValueError. `reference/` gives every op's meaning in NumPy and
imports none of them. Importing this package loads nothing.
"""
