"""The scheduler process: maintenance of one schema, and nothing else. It imports no actor code."""
