"""The patch set: which versions of Ollama it fits, how it is applied to a source tree, and how that
tree is built.
"""
