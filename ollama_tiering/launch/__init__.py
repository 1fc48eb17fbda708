"""Starting, watching and stopping the two processes, and what is built on that: up, demo, doctor."""
