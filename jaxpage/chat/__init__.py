"""`jaxpage chat`: a conversation in the terminal."""
