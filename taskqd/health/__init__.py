"""Health of a process: the sockets that answer probes, the probe, and a child's link to its supervisor."""
