"""Reports of an audit: text, Markdown, HTML and JSON."""
