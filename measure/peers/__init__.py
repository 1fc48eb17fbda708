"""Other programs that run the same model file, measured beside ours: where their packages are
installed, the process that has one loaded, and how a benchmark talks to it.
"""
