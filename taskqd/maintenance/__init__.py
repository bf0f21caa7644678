"""What keeps a schema healthy, and fires its schedules: the duties, and what hosts them in a process."""
