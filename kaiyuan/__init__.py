"""Reproduce the pre-training of Kaiyuan-2B on Megatron.

Importing this package is cheap: neither torch nor Megatron is loaded before a verb needs it.
"""

__version__ = "0.1.0"
