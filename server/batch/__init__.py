"""`jaxpage run-batch`: files of requests, as OpenAI's batch API takes them."""
