"""What `tiering doctor` looks at on this machine."""
