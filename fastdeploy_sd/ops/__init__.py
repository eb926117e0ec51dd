"""The ops: one Python function each, over Paddle tensors.

`reference/` gives every op's meaning in NumPy, `native/` calls the same kernels with NumPy arrays and without Paddle
(tests and tools), and the modules beside them are what layers and models call. Importing this package loads nothing.
"""
