"""Model definitions, a file per family, and what they share."""
