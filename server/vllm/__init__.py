"""Routes that vLLM's servers have besides OpenAI's."""
