"""Optuna's storage of a sweep: opened, or refused with the reason."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna
    import sqlalchemy

CONNECT_S = 5
PATIENCE_S = 60.0
RETRY_S = 0.5
# What trials and heartbeats are read and written by. Optuna's cache of ended trials calls some private methods.
_REPEATED = (
    *("get_trial", "get_all_trials", "_get_trials", "get_study_user_attrs", "get_study_system_attrs"),
    *("create_new_trial", "_create_new_trial", "set_trial_param", "_set_trial_param", "set_trial_state_values"),
    *("set_trial_intermediate_value", "set_trial_user_attr", "set_trial_system_attr", "set_study_system_attr"),
    *("record_heartbeat", "_get_stale_trial_ids"),
)
INSTALL = "pip install 'ddp_loop[sweep]'"


class StorageUnreachable(ValueError):
    """The storage of a sweep cannot be opened."""


def require_optuna() -> None:
    """Raise ImportError, with the remedy, unless optuna is installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(f"A sweep needs optuna. {error.name} is missing. Run {INSTALL}") from error


def _settings(url: str) -> dict[str, Any]:
    """What SQLAlchemy's engine of a storage is made with."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}  # for another process's transaction
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_S}}


class Patience:
    """Repeats calls to a storage while its server restarts, or while its file is locked, for `PATIENCE_S` seconds.

    Optuna leaves that to its caller. If a call had succeeded and only its answer was lost, the next one adds a second
    attempt of the same number at most, which is withdrawn.

    Attributes:
        ends: whether the caller wants the error now.
        say: prints a line.
        failed_at: when a call failed last, by `time.monotonic`.
    """

    def __init__(self, url: str) -> None:
        self.ends: Callable[[], bool] = lambda: False
        self.say: Callable[[str], None] = lambda line: None
        self.failed_at = float("-inf")
        self._url = url
        self._since = float("inf")

    def call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        while True:
            try:
                result = method(*arguments, **keywords)
            except (SQLAlchemyError, OptunaError) as error:
                if not _is_transient(error):
                    raise
                self.failed_at = time.monotonic()
                if self._since == float("inf"):
                    self._since = self.failed_at
                    self.say(
                        f"The storage {shown_url(self._url)} does not answer ({_cause(error)}). Running trials go on. "
                        f"The sweep waits for it, {PATIENCE_S:g} s at most."
                    )
                if self.failed_at - self._since >= PATIENCE_S or self.ends():
                    raise
                time.sleep(RETRY_S)
            else:
                if self._since < float("inf"):
                    self._since = float("inf")
                    self.say(f"The storage {shown_url(self._url)} answers again.")
                return result


def _is_transient(error: Exception) -> bool:
    """Whether the same call may succeed a little later."""
    from sqlalchemy.exc import InterfaceError, OperationalError, PendingRollbackError, SQLAlchemyError

    found = error if isinstance(error, SQLAlchemyError) else error.__cause__
    if isinstance(found, PendingRollbackError):  # Optuna asked again on the connection that had just been lost
        found = found.__context__
    if not isinstance(found, OperationalError | InterfaceError):
        return False
    in_sqlite: str | None = getattr(found.orig, "sqlite_errorname", None)
    return in_sqlite is None or in_sqlite.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _cause(error: Exception) -> str:
    return str(error.__cause__ or error).splitlines()[0]


def open_storage(
    url: str,
    beat_s: int,
    grace_s: int,
    on_stale: Callable[[optuna.Study, optuna.trial.FrozenTrial], None],
    patience: Patience,
) -> optuna.storages.RDBStorage:
    """Open a storage.

    Args:
        beat_s, grace_s: seconds between heartbeats, and after which an attempt without one is settled.
        on_stale: called for each such attempt that this process settles.
        patience: repeats the calls that fail later.
    """
    import optuna
    from sqlalchemy import event

    with warnings.catch_warnings(), _explaining(url):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        _create_whole(url)
        storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs=_settings(url),
            heartbeat_interval=beat_s,
            grace_period=grace_s,
            heartbeat_stale_trial_callback=on_stale,
        )
    if url.startswith("sqlite"):
        # Optuna reads a trial's state and then changes it. SQLite locks no row meanwhile, and without this its
        # transaction begins with the change, so two workers would take the same trial.
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    for name in _REPEATED:
        setattr(storage, name, partial(patience.call, getattr(storage, name)))
    return storage


def _create_whole(url: str) -> None:
    """Create the tables of an SQLite storage, all of them or none, and no other file.

    SQLite commits each table and each index by itself, and Optuna adds only tables that are missing. After a kill in
    between, the study's name had no unique index, and each start added another study of the same name. So they are made
    in memory, and written in one transaction, which SQLite undoes after a kill.
    """
    import optuna
    import sqlalchemy
    from sqlalchemy.engine import make_url
    from sqlalchemy.pool import NullPool

    name = make_url(url).database if url.startswith("sqlite") else None
    if not name or name == ":memory:":
        return
    engine = sqlalchemy.create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", **_settings(url))
    with engine.connect() as file:
        if _has_tables(file):
            return
        made = optuna.storages.RDBStorage("sqlite://")
        try:
            with made.engine.connect() as memory:
                database: Any = memory.connection.driver_connection
                statements = [*database.iterdump()][1:-1]  # without BEGIN and COMMIT
        finally:
            made.remove_session()
            made.engine.dispose()
        file.exec_driver_sql("BEGIN IMMEDIATE")
        for statement in () if _has_tables(file) else statements:  # another process may just have made them
            file.exec_driver_sql(statement)
        file.exec_driver_sql("COMMIT")


def _has_tables(connection: sqlalchemy.Connection) -> bool:
    return connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is not None


@contextmanager
def failures_explained(url: str) -> Iterator[None]:
    """Raise a storage's error of the block, in which a sweep runs, as StorageUnreachable."""
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        raise StorageUnreachable(
            f"The storage {shown_url(url)} failed while the sweep ran ({_cause(error)}). Running trials "
            "were stopped with checkpoints. Start the sweep again when the storage can be read and written."
        ) from error


def check_reachable(url: str) -> None:
    """Raise StorageUnreachable unless a storage can be reached; nothing is written."""
    require_optuna()  # which needs sqlalchemy
    import sqlalchemy

    with _explaining(url):
        engine = sqlalchemy.create_engine(url, **_settings(url))
        try:
            engine.connect().close()
        finally:
            engine.dispose()


def folders_in(url: str) -> list[Path]:
    """The folders of the sweeps in a storage."""
    import optuna

    with silent(), _explaining(url):
        storage = optuna.storages.RDBStorage(url, engine_kwargs=_settings(url))
        try:
            found = [study.user_attrs.get("folder") for study in storage.get_all_studies()]
        finally:
            storage.remove_session()
            storage.engine.dispose()
    return [Path(one) for one in found if one is not None]


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        raise StorageUnreachable(
            f"The storage {shown_url(url)} needs a driver: {error}. Install it, such as psycopg for PostgreSQL: "
            "pip install 'psycopg[binary]'."
        ) from error
    except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
        remedy = "Check that it runs and may be written, or leave storage= out to use a file in the sweep's folder."
        if url.startswith("sqlite"):
            remedy = "Check that its folder exists, may be written and has room."
        raise StorageUnreachable(
            f"The storage {shown_url(url)} cannot be opened ({str(error).splitlines()[0]}). {remedy}"
        ) from error


@contextmanager
def silent() -> Iterator[None]:
    """Leave out Optuna's lines about what it does, which belong to a script that calls Optuna itself."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def sqlite_url(file: Path) -> str:
    """The URL of the storage in an SQLite file."""
    require_optuna()  # which needs sqlalchemy
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(file)).render_as_string()  # a path may have ? and %


def shown_url(url: str) -> str:
    """A storage's URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        raise StorageUnreachable(
            f"A storage is given by SQLAlchemy's URL, such as postgresql+psycopg://user@host/name. Got {url!r}."
        ) from None
