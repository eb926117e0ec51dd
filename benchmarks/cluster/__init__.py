"""A simulated deployment: the product's engines and router over measured step times, on a clock of its own."""
