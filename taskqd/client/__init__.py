"""The client: enqueue jobs and read them."""
