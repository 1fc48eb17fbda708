"""The operating system: files, directories, threads, locks, log lines. It knows
nothing of blocks.
"""
