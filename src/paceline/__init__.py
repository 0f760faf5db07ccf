"""Train PyTorch models across whatever machines you have."""
