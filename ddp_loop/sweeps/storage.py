"""Optuna's storage of a sweep: opened, or refused with the reason."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

CONNECT_S = 5
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


def open_storage(
    url: str, beat_s: int, grace_s: int, on_stale: Callable[[optuna.Study, optuna.trial.FrozenTrial], None]
) -> optuna.storages.RDBStorage:
    """Open a storage.

    Args:
        beat_s, grace_s: seconds between heartbeats, and after which an attempt without one is settled.
        on_stale: called for each such attempt that this process settles.
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
    return storage


def _create_whole(url: str) -> None:
    """Create the file of an SQLite storage, with all its tables or not at all.

    SQLite commits each table and each index by itself, and Optuna adds only tables that are missing. After a kill in
    between, the study's name had no unique index, and each start added another study of the same name.
    """
    import optuna
    from sqlalchemy.engine import make_url

    name = make_url(url).database if url.startswith("sqlite") else None
    if not name or name == ":memory:" or Path(name).exists():
        return
    temporary = Path(name).with_name(f".{Path(name).name}-{secrets.token_hex(4)}")
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{temporary}")
        storage.remove_session()
        storage.engine.dispose()
        try:
            os.link(temporary, name)
        except FileExistsError:
            pass  # another process has just created it
        except OSError:  # a file system without links
            temporary.replace(name)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def failures_explained(url: str) -> Iterator[None]:
    """Raise a storage's error of the block, in which a sweep runs, as StorageUnreachable."""
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        cause = error.__cause__ or error
        raise StorageUnreachable(
            f"The storage {shown_url(url)} failed while the sweep ran ({str(cause).splitlines()[0]}). Running trials "
            "were stopped with checkpoints. Start the sweep again when the storage can be read and written."
        ) from error


def check_reachable(url: str) -> None:
    """Raise StorageUnreachable unless a storage can be reached; nothing is written."""
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
        raise StorageUnreachable(
            f"The storage {shown_url(url)} cannot be opened ({str(error).splitlines()[0]}). Check that it runs and may "
            "be written, or leave storage= out to use a file in the sweep's folder."
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
