"""Benchmarks. Every number is compared with one that was measured in the same run on the same
machine.
"""
