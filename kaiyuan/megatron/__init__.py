"""Everything that imports Megatron; nothing outside this package does."""
