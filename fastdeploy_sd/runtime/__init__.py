"""What runs ops without knowing one: the kernel library, memory, tensors, recordings, Paddle operators."""
