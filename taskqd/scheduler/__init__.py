"""The scheduler process: maintenance of one schema. It imports no actor code."""
