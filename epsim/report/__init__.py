"""What people look at: the table, the Markdown and the page, all from results.json alone."""
