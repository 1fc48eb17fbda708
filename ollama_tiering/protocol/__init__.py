"""What both ends of the protocol need: messages as values, limits, and names."""
