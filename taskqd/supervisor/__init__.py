"""The supervisor: starts a workgroup's processes, watches them, restarts what dies, stops all in bounded
time.

The process itself uses the standard library and pure modules alone; what needs more runs in the preflight
child.
"""
