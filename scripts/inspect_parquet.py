#!/usr/bin/env python3
"""Show what parquet files hold: `kaiyuan inspect` under the name that the reference uses.

python scripts/inspect_parquet.py data/phase1 --html phase1.html
"""

import sys

from kaiyuan.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "inspect")
    main()
