"""What a model writes, read as reasoning, content and tool calls; and what it is asked to write."""
