"""Stand-ins for parts that are slow or that fail too rarely: a toy language model, drafting methods with a habit."""
