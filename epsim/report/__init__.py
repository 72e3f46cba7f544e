"""What people look at: the table, the Markdown and the page, all from results.json alone."""

from epsim.report.write import write_report

__all__ = ["write_report"]
