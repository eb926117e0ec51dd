"""NumPy meaning of every op. Written from the definition, never from a kernel; bfloat16 arrays are u16 bits."""
