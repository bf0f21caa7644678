"""Attempts of actors with ``isolation="process"``, each in a process of its own that can be killed whole.

A worker with such actors forks its **zygote** before its first thread. For each attempt the zygote forks a process and
stays its parent. Whatever that process starts and leaves behind comes to itself, and with its end to the zygote, which
has no other children: who is a stranger there has outlived its attempt, and is killed, whatever session it is in. The
worker's end is the zygote's, and it takes all of them with it.
"""
