"""The drafters of the kernel library that read tokens only, as Python classes. Knows no requests."""
