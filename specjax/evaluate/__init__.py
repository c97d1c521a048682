"""Models measured by tasks."""
