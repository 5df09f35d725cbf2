"""Programs for GPUs that need not be here: what is in their machine code, and what a step should take there."""
