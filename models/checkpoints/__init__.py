"""Checkpoint formats, a file each, behind one view."""
