"""Functional models as values (`served_model`), and ways to make them: from checkpoints of known families (`registry`)."""
