"""Puts the calls of the tiering into llama-server's own sources, by anchors instead of a diff."""
