"""What runs did: a table for the terminal, a picture, and one self-contained HTML page."""

from kaiyuan.report.page import write_page
from kaiyuan.report.run import Run
from kaiyuan.report.table import draw_losses, phase_table

__all__ = ["Run", "draw_losses", "phase_table", "write_page"]
