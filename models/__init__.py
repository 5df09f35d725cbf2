"""Functional models and how their weights are loaded. A model is a module of pure functions; see `registry`."""
