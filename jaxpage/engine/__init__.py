"""The engine: its core, its process, and the loops around scheduler and device."""
