"""The operating system: files, directories, threads, locks, log lines. Knows no block."""
