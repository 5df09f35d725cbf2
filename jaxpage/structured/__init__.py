"""Structured output: what a request says of its text, as a grammar, and which tokens the grammar lets follow."""
