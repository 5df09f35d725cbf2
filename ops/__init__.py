"""The arithmetic: plain functions over arrays, with no jit and no state. Imports nothing of ours."""
