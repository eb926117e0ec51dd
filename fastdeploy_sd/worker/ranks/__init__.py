"""How the ranks of a tensor-parallel group follow rank 0 step by step."""
