"""Requests on both sides of the wire: checked and turned into text by the client, advanced by the engine."""
