"""The ops: one Python function each.

The modules here work on Paddle tensors; layers and models call them. `native/` calls the same kernels with NumPy arrays
and without Paddle: what a step does outside the model (batches, sampling, judging drafts, drafting from text), tests
and tools. `reference/` gives every op's meaning in NumPy. Importing this package loads nothing.
"""
