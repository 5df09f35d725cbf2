"""OpenAI's protocol: completions, chats, responses and embeddings."""
