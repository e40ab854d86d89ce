"""Between Megatron's checkpoints and Hugging Face folders."""
