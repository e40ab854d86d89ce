"""Processes that must not outlive the one that started them."""

import os
import threading
import time


def end_with(parent: int) -> None:
    """End this process soon after ``parent``, its parent, has gone, even by kill -9."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
