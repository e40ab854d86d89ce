#!/usr/bin/env python3
"""Convert a phase's parquet files to Megatron's .bin/.idx: `kaiyuan convert` under the name that
the reference gives it; see `kaiyuan convert --help`."""

import sys

from kaiyuan.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()
