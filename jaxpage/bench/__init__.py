"""Benches, a file each."""
