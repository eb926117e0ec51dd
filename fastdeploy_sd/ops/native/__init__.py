"""The kernels called with NumPy arrays through the C functions: no Paddle needed. bfloat16 arrays are u16 bits."""
