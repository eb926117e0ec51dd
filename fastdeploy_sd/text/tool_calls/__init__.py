"""Tool calls in the text of an answer: each model family has its format, with a parser and a grammar."""
