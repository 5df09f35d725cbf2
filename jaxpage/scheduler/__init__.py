"""Who computes how many tokens in each step."""
