"""Runs gathered into one page: tables beside the papers' figures, and pictures.

from hf_recurrent.report import gather, write_report

write_report(gather(["runs"]), Path("report.html"))
"""

from .page import write_page
from .runs import Runs, gather
from .sections import sections

__all__ = ["Runs", "gather", "write_report"]


def write_report(runs: Runs, output, papers: bool = False) -> None:
    """
    Args:
        output: a path that ends in .html, a page with everything in it, or in .md, with the pictures in a folder
            beside it.
        papers: also list the papers' figures that no run stands beside.

    Raises:
        ValueError: another ending.
        OSError: it cannot be written; an earlier page is untouched.
    """
    write_page(sections(runs, papers), output)
