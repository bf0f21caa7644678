"""The worker process: claims jobs, runs actors, settles outcomes."""
