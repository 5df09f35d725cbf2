"""The HTTP face: OpenAI's completions and chat protocol over `jaxpage.async_engine`."""
