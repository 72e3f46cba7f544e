"""Makes the terminal's table, the Markdown page and the HTML page of results.json."""
