"""Where time and memory go: what a configuration needs, what it was measured to take."""
