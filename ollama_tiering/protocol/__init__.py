"""What both ends of the protocol need: its messages as values, its limits, its words."""
