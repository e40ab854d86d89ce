"""``python -m kaiyuan`` is the command ``kaiyuan``."""

from kaiyuan.cli import main

if __name__ == "__main__":
    main()
