"""What prompts had to be computed for, although something like them is stored: `tiering why`."""
