"""Speculation: cheap guesses at the next tokens, which the model checks several at a time. It changes no answer."""
