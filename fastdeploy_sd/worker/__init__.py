"""The only package that runs the model: turns a plan into arrays, the arrays into tokens."""

import warnings

# Paddle recommends ccache whenever it is imported, which is of no use to people who start a server.
warnings.filterwarnings("ignore", "No ccache found")
