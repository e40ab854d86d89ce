"""Parquet in, Megatron's .bin/.idx out, in the order of the data."""
