"""Benchmarks.

Every number stands beside one that was measured in the same run on the same machine.
"""
