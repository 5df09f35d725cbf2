"""Functional models as values (`served_model`), and ways to make them, such as from checkpoints (`registry`)."""
