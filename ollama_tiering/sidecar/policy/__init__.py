"""What is restored of a prompt, for all engines: which history, how much, and whether it pays."""
