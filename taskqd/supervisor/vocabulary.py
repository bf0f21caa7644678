"""Every event that the supervisor logs, with its meaning. Nothing else is logged: a test compares the code."""

from __future__ import annotations

from collections.abc import Mapping

CHANGES = ("reload", "restart", "scale", "drain", "resume", "recycle", "renew")
"""What is changed one after the other while the group runs."""

_STEPS = {
    "begin": "The {} is being made.",
    "done": "The {} is made; `result` says what came of it.",
    "failed": "The {} was refused or aborted; `why` says the reason, `exit_code` what the caller was told.",
    "broken-off": "The group stops: the {} is not made to its end.",
    "error": "The {} failed for a reason that nobody foresaw; `left` is the traceback.",
}

EVENTS: Mapping[str, str] = {
    # the group
    "preflight": "The check before the start begins.",
    "preflight-warning": "What the check found and does not refuse.",
    "workgroup.start": "The group has its plan and starts its processes.",
    "standstill": "The supervisor itself did not run for `gap_s` seconds: nobody is blamed for silence in that time.",
    "correlated-stall": "Most processes went silent together: the machine is blamed, and nobody killed for `kill_in`.",
    "correlated-exit": "Many died at one time: nothing is started for `pause_s`, and then one after the other.",
    "throttled": "The control group waits for the processor for `share` of the time: deadlines count twice.",
    "throttled-no-more": "It gets enough again.",
    "status": "SIGUSR1 asked how everybody does.",
    "sighup-refused": "SIGHUP asked for a reload that cannot be made now.",
    "sigusr2-refused": "SIGUSR2 asked for fresh processes while that cannot be.",
    "files-restored": "Somebody had removed `what` of the group's files; it is there again.",
    "files-lost": "Something of the group's files is gone and cannot be made again, for the reason in `why`.",
    "log-lines-dropped": "Standard error did not take `count` lines, its processes' included where they are captured.",
    "shutdown-begin": "The group was asked to stop, and everybody is, within `within_s`.",
    "shutdown-hurry": "A second request: what still runs is cancelled.",
    "shutdown-kill": "A third request: what still runs is killed.",
    "shutdown-quit": "SIGQUIT: what runs shows its stacks and is killed.",
    "shutdown-complete": "The supervisor ends with `exit_code`; `not_clean` names whom it had to kill or who failed, "
    "`jobs_killed` says how many jobs ran in those that it killed.",
    # one process
    "spawn": "A process was made.",
    "spawn-failed": "The system refused to make one; it is tried again.",
    "ready": "It works, `boot_s` after it was made.",
    "stopped": "A signal or a debugger holds it.",
    "continued": "It goes on.",
    "stalled": "It sends no beats; it is killed in `kill_in` seconds.",
    "recovered": "It beats again, after `stalled_s`.",
    "verdict": "What it suffers from.",
    "stacks": "Where its threads are.",
    "beat-error": "It could not say how it does.",
    "kill": "It is sent a deadly signal.",
    "lost": "SIGKILL did not end it: it hangs in the kernel.",
    "child-exit": "It ended: `code`, `class`, `why`, and what it said, printed and left behind.",
    "restart-scheduled": "It is started again in `delay_s`.",
    "degraded": "It failed so often in a row that the group counts as not ready; it is tried on.",
    "given-up": "It is not started again until it is resumed or its file changes.",
    # the process that workers are forked from
    "preload-ready": "The actors are imported: `workers` are forked from `pid` from now on.",
    "preload-unfit": "`workers` are not forked, for the reason in `why`, but started by exec.",
    "preload-died": "It ended; another is started in `retry_in` seconds.",
    # jobs and credentials
    "jobs-released": "The jobs of dead workers are settled.",
    "release-failed": "Nobody could settle them; it is tried again.",
    "jobs-left-to-leases": "Processes of a predecessor may still live: their jobs come back when their leases end.",
    "record-unreadable": "What a predecessor wrote of its processes is broken: their jobs wait for their leases.",
    "credentials-reloaded": "Every process has the present credential, but for those in `failed`.",
    "not-declared": "What the group may hold could not be told to its neighbours, for the reason in `why`.",
    # changes
    "quiet-done": "The processes in `why` claim nothing from now on.",
    **{f"{verb}-{step}": text.format(verb) for verb in CHANGES for step, text in _STEPS.items()},
    "recycle": "A process makes room for a fresh one, for the reason in `why`.",
}
