"""The only package that runs the model: turns a plan into arrays, the arrays into tokens."""
