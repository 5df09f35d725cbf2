"""Paged attention: the cache, its kernels and their references."""
