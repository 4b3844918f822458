"""Writing that survives a crash: a name counts only when what it names is on the disk.

A file is written beside its name (NAME.part), flushed, renamed, and its folder is flushed. Several files that belong
together are all flushed before the first is renamed, and renamed in order, each rename on the disk before the next.
Between two renames the files that are still called .part are whole: a reader of the set can take them
(`surgery/checkpoint.py` does). Two processes that write the same name wait for each other.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rankwise.errors import RankwiseError, need

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
# Some file systems cannot flush a folder; some folders may be written to and not opened. Neither is an error of ours.
_NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES, errno.EISDIR, errno.EPERM)
_TRIES = 100  # to open a name that others rename or remove at the same time


def part_of(path: Path) -> Path:
    """Where a file lies until it is whole."""
    return path.parent / f"{path.name}.part"


def why(err: Exception) -> str:
    """For a sentence: of what torch says of itself, the first line."""
    return getattr(err, "strerror", None) or (str(err).splitlines() or [""])[0] or type(err).__name__


def make_folder(path: Path, advice: str = "give another --out") -> None:
    """The folder and those above it, each on the disk before the next is made in it."""
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            flush_folder(folder.parent)
        path.mkdir(exist_ok=True)  # says so where a file lies there
    except (OSError, ValueError, MemoryError) as err:
        raise RankwiseError(f"the folder {path} could not be made ({why(err)}): {advice}") from None


def flush_folder(path: Path) -> None:
    """The names in a folder, and what they name, as they are now also after a crash."""
    try:
        folder = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as err:
        if err.errno not in _NO_FLUSH:
            raise


def write_part(path: Path, data: bytes | memoryview) -> None:
    """A file that gets its name later (`rename`), when it has been looked at; it is on the disk."""
    file = _open_alone(path)
    try:
        _write(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def rename(part: Path, path: Path) -> None:
    """Give a file or a folder that is on the disk its name, for good."""
    os.replace(part, path)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """A file that is not needed any more. One that stays does no harm."""
    for _ in range(2):
        with suppress(OSError, ValueError, MemoryError):
            path.unlink(missing_ok=True)
            return


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old content or the new, never a part."""
    write_together({path: data})


def write_together(contents: Mapping[Path, bytes | None]) -> None:
    """Write several files; what fails before the first rename changes nothing.

    A rename that fails later is tried once more. If it fails again, the rest stays under .part for the reader.
    A path without content is removed, after the files before it have their names and before those after it.
    """
    parts = {path: part_of(path) for path in contents}
    path, renamed = next(iter(contents)), list[Path]()
    try:
        with ExitStack() as open_files:
            for path in sorted(contents):  # always in this order: no two processes wait for each other
                content = contents[path]
                if content is None:
                    continue
                file = _open_alone(parts[path])
                open_files.callback(os.close, file)
                open_files.callback(_discard, parts[path], renamed)  # before it is closed, while it is ours
                _write(file, content)
                os.fsync(file)
            if fcntl is None:
                renamed.extend(contents)
                open_files.close()  # Windows renames no open file, and has no lock to keep here
                renamed.clear()
            if len(contents) > 1:
                for folder in {path.parent for path in contents}:
                    flush_folder(folder)
            for path, part in parts.items():
                if contents[path] is None:
                    _unlink(path)
                else:
                    _replace(part, path, tries=2 if renamed else 1)
                    renamed.append(path)
                _flush_again(path.parent)
    except (OSError, ValueError, MemoryError) as err:
        raise RankwiseError(f"{path} could not be written ({why(err)}): check the folder and the space left") from None


def _discard(part: Path, renamed: list[Path]) -> None:
    """Nothing was renamed, so it is not needed."""
    if not renamed:
        remove(part)


def _flush_again(folder: Path) -> None:
    """Between two renames a second attempt is worth it: without it the rest stays under .part."""
    try:
        flush_folder(folder)
    except (OSError, MemoryError):
        flush_folder(folder)


def _replace(part: Path, path: Path, tries: int) -> None:
    try:
        os.replace(part, path)
    except (OSError, MemoryError):
        if tries == 1:
            raise
        _replace(part, path, tries - 1)


def _unlink(path: Path) -> None:
    """Tried once more, as renames between other renames are."""
    try:
        path.unlink(missing_ok=True)
    except (OSError, MemoryError):
        path.unlink(missing_ok=True)


def _write(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left[: 1 << 30]) :]  # Linux writes at most 2 GiB at a time


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with the lock file `path`, which is gone afterwards.

    A killed process holds no lock.
    """
    if fcntl is None:
        with need("filelock", extra="train", purpose="running a study").FileLock(path):
            yield
        return
    try:
        file = _open_alone(path)
    except OSError as err:
        raise RankwiseError(f"{path} could not be made ({why(err)}): check the folder and the space left") from None
    try:
        yield
    finally:
        remove(path)  # a process that waits for it sees that it is gone, and makes a new one
        os.close(file)


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Refuse where another process is in here with the same folder. A killed process is in no folder."""
    if fcntl is None:
        yield
        return
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError as err:
        raise RankwiseError(f"the folder {folder} could not be opened ({why(err)}): give another --out") from None
    try:
        _refuse_second(file, folder)
        yield
    finally:
        os.close(file)


def _refuse_second(file: int, folder: Path) -> None:
    try:
        _lock(file, wait=False)
    except BlockingIOError:
        raise RankwiseError(
            f"another process is working in {folder}: wait until it has ended, or give another --out"
        ) from None


def _open_alone(path: Path) -> int:
    """An empty file at `path` that no other process has open in this way; links that lie there are not followed."""
    for _ in range(_TRIES):
        try:
            file = os.open(path, _FLAGS, 0o666)
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
            os.unlink(path)  # a symbolic link in the place of our own file
            continue
        try:
            _lock(file)
            if _emptied(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    raise OSError(errno.EBUSY, "others write it all the time")


def _emptied(file: int, path: Path) -> bool:
    """Whether `file`, which is locked, still lies at `path`, under no other name; then it is empty now."""
    here, there = os.fstat(file), _stat(path)
    if there is None or (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev):
        return False
    try:
        if here.st_nlink == 1 and stat.S_ISREG(here.st_mode):
            os.ftruncate(file, 0)
            return True
        os.unlink(path)  # another name of somebody's file
        return False
    except BaseException:
        remove(path)
        raise


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _lock(file: int, wait: bool = True) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as err:
        if err.errno not in _NO_LOCKS:  # a file system without locks: files stay whole, the last writer wins
            raise
