"""Weights that are replaced while the engine serves."""
