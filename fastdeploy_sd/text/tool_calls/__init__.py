"""Calls of functions in the text of an answer: each family of models has its format, with a parser and a grammar."""
