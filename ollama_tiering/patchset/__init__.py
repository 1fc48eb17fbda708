"""The patch set: which upstream it fits, how it is applied to a plain tree, and how that tree is
built.
"""
