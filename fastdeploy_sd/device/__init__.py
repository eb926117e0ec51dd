"""Host and CUDA memory, the kernel library, and the machine they run on."""
