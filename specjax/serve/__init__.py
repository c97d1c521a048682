"""Text in, text out: requests, the rows they are decoded in, and records."""
