"""The store by itself. Each number is compared with what the machine does without it, in the same
run.
"""
