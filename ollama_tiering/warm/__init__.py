"""Prompts that are computed and stored ahead of time, so that the first request with them waits for
little: Home Assistant's, an agent's, a long system prompt's.
"""
