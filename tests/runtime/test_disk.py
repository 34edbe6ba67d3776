"""The simulated disk sees what is known of SQLite: what survives, what is lost, what is unknown.

The toy: transactions 0, 1, 2, … of three rows each, a checkpoint now and then, and a mark in the
log for every commit that returned.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import apsw
import pytest

from onepen.runtime.testing import (
    Disk,
    Failure,
    Fault,
    Image,
    Kind,
    Log,
    Loss,
    Marked,
    Operation,
    Synced,
    Truncated,
    Written,
    images,
)
from onepen.runtime.testing.disk.log import content_after

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATABASE = "toy.db"
ROWS_PER_TRANSACTION = 3
TRANSACTIONS = 8
CHECKPOINT_EVERY = 3


def run(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
    # apsw's stubs name a Buffer type that Python 3.11 does not have.
    return connection.execute(sql, bindings).fetchall()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def connect(disk: Disk, *, synchronous: str = "full", journal: str = "wal") -> apsw.Connection:
    connection = apsw.Connection(str(disk.directory / DATABASE), vfs=disk.name)
    try:
        run(connection, f"pragma journal_mode = {journal}")
        run(connection, f"pragma synchronous = {synchronous}")
        connection.wal_autocheckpoint(0)
        run(connection, "create table if not exists toy (number, part, body)")
    except apsw.Error:
        close(connection)
        raise
    return connection


def close(connection: apsw.Connection) -> None:
    try:
        connection.close()
    except apsw.Error:
        pass  # a fault hit the last checkpoint; the connection is closed all the same


def commit(connection: apsw.Connection, number: int) -> None:
    run(connection, "begin immediate")
    try:
        for part in range(ROWS_PER_TRANSACTION):
            run(connection, "insert into toy values (?, ?, ?)", (number, part, "x" * 1500))
        run(connection, "commit")
    except apsw.Error:
        if connection.in_transaction:
            run(connection, "rollback")
        raise


def work(disk: Disk, *, synchronous: str = "full", journal: str = "wal") -> None:
    """The whole toy, up to the first error."""
    connection = connect(disk, synchronous=synchronous, journal=journal)
    try:
        for number in range(TRANSACTIONS):
            disk.mark("begin", number)
            commit(connection, number)
            disk.mark("ack", number)
            if number % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
                run(connection, "pragma wal_checkpoint(truncate)")
    finally:
        disk.mark("closing")
        close(connection)


def numbers_in(directory: Path) -> list[int]:
    """The transactions that a fresh start finds; raises if the database is damaged."""
    connection = apsw.Connection(str(directory / DATABASE))
    try:
        run(connection, "pragma synchronous = off")
        if run(connection, "pragma integrity_check") != [("ok",)]:
            raise apsw.CorruptError("integrity_check")
        if not connection.table_exists("main", "toy"):
            return []
        rows = run(connection, "select number, count(*) from toy group by number order by number")
    finally:
        close(connection)
    assert all(count == ROWS_PER_TRANSACTION for _, count in rows), "a transaction was torn"
    return [number for number, _ in rows]


def recorded(directory: Path, *, synchronous: str = "full", journal: str = "wal") -> Log:
    directory.mkdir()
    with Disk(directory) as disk:
        work(disk, synchronous=synchronous, journal=journal)
        return disk.log


def survivors(image: Image, scratch: Path) -> list[int]:
    directory = image.write_to(scratch / image.name)
    found = numbers_in(directory)
    # Thousands of images: those that are sound need not be kept, and hardly ever reach the disk.
    shutil.rmtree(directory)
    return found


def assert_prefix(found: list[int], acked: int, begun: int) -> None:
    """All that was acknowledged, and at most the one that was under way."""
    assert found == list(range(len(found)))
    assert acked <= len(found) <= begun


# Power loss


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_full_sync_loses_nothing_acknowledged_at_any_point(tmp_path: Path, journal: str) -> None:
    for image in images(recorded(tmp_path / "live", journal=journal), seed=1):
        found = survivors(image, tmp_path)
        assert_prefix(found, len(image.payloads("ack")), len(image.payloads("begin")))


def test_normal_sync_loses_acknowledged_transactions_but_stays_sound(tmp_path: Path) -> None:
    lost = 0
    for image in images(recorded(tmp_path / "live", synchronous="normal"), seed=1):
        found = survivors(image, tmp_path)
        assert_prefix(found, 0, len(image.payloads("begin")))
        lost += len(found) < len(image.payloads("ack"))
    assert lost > 0


def test_without_sync_a_power_loss_corrupts(tmp_path: Path) -> None:
    damaged: set[Loss] = set()
    for image in images(recorded(tmp_path / "live", synchronous="off"), seed=1):
        try:
            survivors(image, tmp_path)
        except (apsw.Error, AssertionError):
            damaged.add(image.loss)
    # A killed process, whose writes the operating system still has, damages nothing.
    assert Loss.TORN in damaged
    assert Loss.ALL_SURVIVE not in damaged


def test_a_second_power_loss_during_recovery_loses_nothing_either(tmp_path: Path) -> None:
    first_images = list(images(recorded(tmp_path / "live"), seed=2, torn=1))
    doubles = 0
    for first in first_images[5::9]:
        acked = len(first.payloads("ack"))
        begun = len(first.payloads("begin"))
        with Disk(first.write_to(tmp_path / f"first-{first.name}")) as disk:
            connection = connect(disk)
            run(connection, "pragma wal_checkpoint(truncate)")
            close(connection)
            log = disk.log
        for second in images(log, seed=3, torn=2):
            doubles += 1
            found = survivors(second, tmp_path / f"{first.name}-then")
            assert_prefix(found, acked, begun)
    assert doubles > 50


def test_the_same_seed_gives_the_same_images(tmp_path: Path) -> None:
    log = recorded(tmp_path / "live")
    once = list(images(log, seed=7))
    assert once == list(images(log, seed=7))
    assert len({image.name for image in once}) == len(once)
    assert once != list(images(log, seed=8))
    window = list(images(log, seed=7, start=20, stop=30))
    assert {image.point for image in window} == set(range(20, 30))
    torn = [image for image in once if image.loss is Loss.TORN and 20 <= image.point < 30]
    assert [image for image in window if image.loss is Loss.TORN] == torn


def test_what_was_there_at_the_start_is_durable_and_shm_is_in_no_image(tmp_path: Path) -> None:
    live = tmp_path / "live"
    recorded(live)
    (live / "toy.db-shm").write_bytes(b"stale")
    (live / "ballast").write_bytes(b"big")
    with Disk(live, skip={"ballast"}) as disk:
        connection = connect(disk)
        commit(connection, TRANSACTIONS)
        log = disk.log
        close(connection)
    first, *_, last = images(log)
    assert set(first.files) == {DATABASE}
    assert set(last.files) == {DATABASE, "toy.db-wal"}
    assert survivors(first, tmp_path) == list(range(TRANSACTIONS))


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate"])
def test_the_log_explains_the_real_files_byte_for_byte(tmp_path: Path, journal: str) -> None:
    log = recorded(tmp_path / "live", journal=journal)
    assert files_in(tmp_path / "live") == final_image(log).files


def test_an_image_is_never_mixed_with_other_files(tmp_path: Path) -> None:
    image = Image(0, Loss.NONE_SURVIVE, 0, (), {"sub/toy.db": b"x"})
    assert (image.write_to(tmp_path / "new") / "sub" / "toy.db").read_bytes() == b"x"
    with pytest.raises(FileExistsError):
        image.write_to(tmp_path / "new")


def test_only_unsynced_changes_are_at_risk() -> None:
    sector = b"a" * 512
    log = Log(
        {"f": sector * 2},
        (Written("f", 0, b"b" * 512), Synced("f"), Written("f", 512, b"c" * 1024), Marked("m")),
    )
    seen = {image.files["f"] for image in images(log, torn=40, start=3)}
    assert all(content.startswith(b"b" * 512) for content in seen)
    assert b"b" * 512 + sector in seen
    assert b"b" * 512 + b"c" * 1024 in seen
    cuts = {content.count(b"c") for content in seen}
    assert 512 in cuts, "cut at a sector"
    assert any(cut % 512 for cut in cuts), "cut anywhere"


def test_holes_read_as_zeros_and_a_truncated_tail_does_not_come_back() -> None:
    assert content_after(b"ab", [Written("f", 4, b"z")]) == b"ab\0\0z"
    assert content_after(b"abcd", [Truncated("f", 1), Truncated("f", 3)]) == b"a\0\0"
    assert content_after(b"abcd", [Written("f", 1, b"XY")]) == b"aXYd"


# I/O errors


def run_with(directory: Path, fault: Fault) -> tuple[Disk, int, int]:
    """The toy with one fault, then the fault healed; how much was acknowledged and begun."""
    directory.mkdir()
    with Disk(directory, faults=[fault]) as disk:
        try:
            work(disk)
        except apsw.Error:
            assert disk.fired
        labels = [entry.label for entry in disk.log.entries if isinstance(entry, Marked)]
        return disk, labels.count("ack"), labels.count("begin")


def death_before_closing(log: Log) -> Iterator[Image]:
    """The images of the point where the last connection had not yet tidied up after the fault."""
    end = len(log.entries)
    point = next((n for n, entry in enumerate(log.entries) if entry == Marked("closing")), end)
    return images(log, start=point, stop=point + 1, torn=1)


def final_image(log: Log) -> Image:
    """What is left if nothing is lost."""
    *_, image = images(log, start=len(log.entries), torn=0)
    return image


def files_in(directory: Path) -> dict[str, bytes]:
    """The real files. For closed databases only: a second descriptor drops SQLite's locks."""
    paths = [path for path in directory.iterdir() if not path.name.endswith("-shm")]
    return {path.name: path.read_bytes() for path in paths}


def content_elsewhere(path: Path) -> bytes:
    """A file as another process sees it, which is safe while the database is open in this one."""
    return subprocess.run(["cat", str(path)], check=True, capture_output=True).stdout


def history(directory: Path, *kinds: Kind) -> list[int]:
    """The numbers of the operations, of these kinds, that a clean run has."""
    directory.mkdir()
    with Disk(directory) as disk:
        work(disk)
        assert disk.operations == len(disk.history)
        return [operation.number for operation in disk.history if operation.kind in kinds]


@pytest.mark.parametrize("repeat", ["once", "sticky"])
@pytest.mark.parametrize(
    ("failure", "kinds"),
    [
        (Failure.EIO, tuple(Kind)),
        (Failure.FULL, (Kind.WRITE,)),
        (Failure.SHORT, (Kind.WRITE,)),
        (Failure.DROP, (Kind.SYNC,)),
    ],
)
def test_an_error_at_any_point_leaves_the_acknowledged_and_at_most_the_unknown(
    tmp_path: Path, failure: Failure, kinds: tuple[Kind, ...], repeat: str
) -> None:
    for number in history(tmp_path / "clean", *kinds):
        directory = tmp_path / str(number)
        disk, acked, begun = run_with(directory, Fault(number, failure, sticky=repeat == "sticky"))
        assert disk.fired[0].number == number
        for image in death_before_closing(disk.log):
            assert_prefix(survivors(image, tmp_path / f"{number}-died"), acked, begun)
        assert files_in(directory) == final_image(disk.log).files
        assert_prefix(numbers_in(directory), acked, begun)


def test_after_a_sync_that_dropped_its_pages_a_power_loss_still_finds_a_prefix(
    tmp_path: Path,
) -> None:
    for number in history(tmp_path / "clean", Kind.SYNC)[4::5]:
        disk, _, begun = run_with(tmp_path / str(number), Fault(number, Failure.DROP))
        for image in images(disk.log, seed=number, torn=1):
            found = survivors(image, tmp_path / f"{number}-images")
            assert_prefix(found, len(image.payloads("ack")), begun)


def test_a_dropped_sync_takes_the_pages_and_a_failed_one_leaves_them_at_risk(
    tmp_path: Path,
) -> None:
    for failure in (Failure.EIO, Failure.DROP):
        directory = tmp_path / failure.name
        directory.mkdir()
        with Disk(directory) as disk:
            connection = connect(disk)
            commit(connection, 0)
            disk.inject(Fault(disk.operations, failure, kinds=frozenset({Kind.SYNC})))
            with pytest.raises(apsw.IOError):
                commit(connection, 1)
            wal = "toy.db-wal"
            assert content_elsewhere(directory / wal) == final_image(disk.log).files[wal]
            by_loss = {
                image.loss: survivors(image, directory / "images")
                for image in images(disk.log, start=len(disk.log.entries), torn=0)
            }
            close(connection)
        # A failed COMMIT is not "not committed": after the EIO a restart may find the row.
        expected = {Loss.NONE_SURVIVE: [0], Loss.ALL_SURVIVE: [0, 1]}
        assert by_loss == (expected if failure is Failure.EIO else {Loss.NONE_SURVIVE: [0]})


@pytest.mark.parametrize(
    ("failure", "kind", "error", "code"),
    [
        (Failure.EIO, Kind.OPEN, apsw.CantOpenError, apsw.SQLITE_CANTOPEN),
        (Failure.EIO, Kind.READ, apsw.IOError, apsw.SQLITE_IOERR_READ),
        (Failure.EIO, Kind.WRITE, apsw.IOError, apsw.SQLITE_IOERR_WRITE),
        (Failure.EIO, Kind.SYNC, apsw.IOError, apsw.SQLITE_IOERR_FSYNC),
        (Failure.EIO, Kind.TRUNCATE, apsw.IOError, apsw.SQLITE_IOERR_TRUNCATE),
        (Failure.EIO, Kind.DELETE, apsw.IOError, apsw.SQLITE_IOERR_DELETE),
        (Failure.FULL, Kind.WRITE, apsw.FullError, apsw.SQLITE_FULL),
        (Failure.SHORT, Kind.WRITE, apsw.FullError, apsw.SQLITE_FULL),
        (Failure.DROP, Kind.SYNC, apsw.IOError, apsw.SQLITE_IOERR_FSYNC),
    ],
)
def test_errors_carry_the_codes_of_a_real_disk(
    tmp_path: Path, failure: Failure, kind: Kind, error: type[apsw.Error], code: int
) -> None:
    fault = Fault(0, failure, kinds=frozenset({kind}))
    with Disk(tmp_path, faults=[fault], count_reads=True) as disk:
        with pytest.raises(error, match="simulated") as caught:
            work(disk)
        assert [operation.kind for operation in disk.fired] == [kind]
    assert vars(caught.value)["extendedresult"] == code


def test_half_of_a_short_write_reaches_the_file(tmp_path: Path) -> None:
    sizes: dict[Failure | None, list[int]] = {}
    for failure in (None, Failure.FULL, Failure.SHORT):
        directory = tmp_path / str(failure)
        directory.mkdir()
        with Disk(directory) as disk:
            connection = connect(disk)
            before = len(disk.log.entries)
            if failure is not None:
                disk.inject(Fault(disk.operations, failure))
                with pytest.raises(apsw.FullError):
                    commit(connection, 0)
            else:
                commit(connection, 0)
            later = disk.log.entries[before:]
            sizes[failure] = [len(entry.data) for entry in later if isinstance(entry, Written)]
            close(connection)
    assert sizes[Failure.FULL] == []
    assert sizes[Failure.SHORT] == [sizes[None][0] // 2]


def test_a_sticky_fault_lasts_until_healed_and_may_be_of_one_file_only(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        connection = connect(disk)
        disk.inject(Fault(disk.operations, Failure.FULL, sticky=True, suffix="-wal"))
        for _ in range(3):
            with pytest.raises(apsw.FullError):
                commit(connection, 0)
        assert {operation.file for operation in disk.fired} == {"toy.db-wal"}
        disk.heal()
        commit(connection, 0)
        close(connection)
    assert numbers_in(tmp_path) == [0]


def test_an_error_that_sqlite_ignores_is_raised_all_the_same(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        connection = connect(disk)
        connection.wal_autocheckpoint(1)
        disk.inject(Fault(disk.operations, suffix=".db", kinds=frozenset({Kind.WRITE})))
        # The commit is done; only the checkpoint behind it failed. A real disk would keep silent.
        with pytest.raises(apsw.IOError):
            commit(connection, 0)
        assert not connection.in_transaction
        assert run(connection, "select count(*) from toy") == [(ROWS_PER_TRANSACTION,)]
        close(connection)


# The disk as a tool


def test_threads_share_one_ordered_log(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        ready = threading.Barrier(2)

        def write() -> None:
            connection = connect(disk)
            ready.wait()
            for number in range(TRANSACTIONS):
                commit(connection, number)
                disk.mark("ack", number)
            close(connection)

        writer = threading.Thread(target=write)
        writer.start()
        ready.wait()
        for _ in range(50):
            close(apsw.Connection(str(tmp_path / DATABASE), vfs=disk.name))
            disk.mark("tick")
        writer.join()
        log = disk.log
    labels = [entry.label for entry in log.entries if isinstance(entry, Marked)]
    assert (labels.count("ack"), labels.count("tick")) == (TRANSACTIONS, 50)
    for image in itertools.islice(images(log, torn=0), 0, None, 5):
        assert_prefix(survivors(image, tmp_path / "images"), len(image.payloads("ack")), 99)


def test_a_held_operation_holds_no_other_thread(tmp_path: Path) -> None:
    held, released = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if (
            operation.kind is Kind.SYNC
            and threading.current_thread() is not threading.main_thread()
        ):
            held.set()
            assert released.wait(10)

    with Disk(tmp_path, on_operation=hold) as disk:
        close(connect(disk))

        def write() -> None:
            connection = connect(disk)
            commit(connection, 0)
            close(connection)

        writer = threading.Thread(target=write)
        writer.start()
        assert held.wait(10)
        reader = apsw.Connection(str(tmp_path / DATABASE), vfs=disk.name)
        assert run(reader, "select count(*) from toy") == [(0,)]
        close(reader)
        released.set()
        writer.join()


KILLED = """
import os, signal, sys
from pathlib import Path
import apsw
from onepen.runtime.testing import Disk, Kind

syncs = 0
def kill(operation):
    global syncs
    syncs += operation.kind is Kind.SYNC and operation.file.endswith("-wal")
    if syncs == 2:
        os.kill(os.getpid(), signal.SIGKILL)

with Disk(sys.argv[1], on_operation=kill) as disk:
    connection = apsw.Connection(str(disk.directory / "toy.db"), vfs=disk.name)
    connection.execute("pragma journal_mode = wal").fetchall()
    connection.execute("pragma synchronous = full; create table toy (number, part, body)")
    connection.execute("insert into toy values (0, 0, ''), (0, 1, ''), (0, 2, '')")
"""


def test_the_callback_may_kill_the_process_at_a_chosen_operation(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=20)
    assert done.returncode == -signal.SIGKILL
    assert numbers_in(tmp_path) in ([], [0])


def test_each_sync_takes_its_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with Disk(tmp_path, sync_delay_s=0.001, sync_real=True, record=False) as disk:
        work(disk)
        assert disk.operations > 0
        assert disk.log == Log({}, ())
        with pytest.raises(ValueError, match="record=True"):
            disk.inject(Fault(0, Failure.DROP))
    assert slept
    assert set(slept) == {0.001}


def test_files_outside_of_the_disk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with Disk(tmp_path / "disk") as disk, pytest.raises(apsw.CantOpenError, match="outside"):
        apsw.Connection(str(tmp_path / DATABASE), vfs=disk.name)


def test_a_closed_disk_is_not_registered_any_more(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk, Disk(tmp_path) as other:
        assert {disk.name, other.name} <= set(apsw.vfs_names())
    assert not {disk.name, other.name} & set(apsw.vfs_names())


def test_what_a_killed_process_had_not_synced_stays_at_risk(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    with Disk(live) as disk:
        connection = connect(disk)
        commit(connection, 0)
        disk.inject(Fault(disk.operations, kinds=frozenset({Kind.SYNC})))
        with pytest.raises(apsw.IOError):
            commit(connection, 1)
        log = disk.log
        close(connection)
    left = final_image(log).write_to(tmp_path / "left")
    with Disk(left, continues=log) as disk:
        connection = apsw.Connection(str(left / DATABASE), vfs=disk.name)
        assert run(connection, "select distinct number from toy") == [(0,), (1,)]
        lost, *_ = images(disk.log, start=len(disk.log.entries))
        close(connection)
    assert survivors(lost, tmp_path / "images") == [0]
