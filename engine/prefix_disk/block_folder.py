"""The folders of the nodes of a host, and the files of blocks in them."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import numpy as np

from common.files.trusted_folder import why_untrusted
from common.kv.blocks import BlockHash
from engine.core.blocks.disk_jobs import (
    OWN_FOLDER,
    DiskFailure,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskScan,
    DiskWrite,
    FileName,
)
from engine.prefix_disk.block_file import (
    HEADER_BYTES,
    CorruptFile,
    check_file,
    file_header,
    header_fields,
)
from engine.prefix_disk.block_seal import SEAL_BYTES, BlockSeal
from engine.prefix_disk.file_calls import FileCalls

MOST_FOLDERS = 64
"""Nodes of a host that share a path; a further one only reads."""
ABANDONED_NS = 7 * 24 * 3600 * 10**9
"""A folder that no node had for so long is emptied by another one."""
MOST_EMPTIED = 4096
"""Files that are removed for that at once."""
MOST_BLOCKS_SEEN = 1_000_000
"""Blocks of other nodes that one node knows of."""
_IN_THE_WAY = (
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM
)  # fmt: skip
"""Errors that say that something else has the place of a folder or of its lock."""
_BLOCK, _NEW, _LOCK = ".kv", ".new", ".lock"
_HASH_LETTERS = 32


class NoFolder(OSError):
    """This node has no folder that it may write to."""


class BlockFolder:
    """The files below `path`, as one node sees them. `host` is its memory for prefixes.

    `host` is `[layers, planes, host blocks, piece_bytes]`. With a `seal` files are encrypted, and
    are in a folder that names its key: with another key they are those of another model. One
    thread may look and write while another one reads.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        host: np.ndarray,
        calls: FileCalls | None = None,
        seal: BlockSeal | None = None,
    ) -> None:
        self._path, self._fingerprint, self._host = path, fingerprint, host
        self._calls = calls or FileCalls()
        self._seal = seal
        self._name = fingerprint if seal is None else f"{fingerprint}-{seal.name}"
        self._own = OWN_FOLDER
        self._lock: int | None = None
        block_bytes = host.nbytes // host.shape[2]
        self.file_bytes = file_bytes(block_bytes, is_sealed=seal is not None)
        self._content = np.empty(self.file_bytes - HEADER_BYTES, np.uint8)
        """The content that was read last."""

    def look(self, look: DiskLook) -> DiskResult:
        """List the blocks of all folders.

        Without a folder of its own a node still sees the others, unless another user may have put
        them there.

        It fails where this node cannot have a folder, or has it no more.
        """
        failure, why = None, ""
        own: tuple[BlockHash, ...] = ()
        strangers: tuple[tuple[str, int], ...] = ()
        try:
            if look.is_all:
                self._take_folder()
                own, strangers = self._scan_own()
            elif self._lock is not None:
                self._check_own()
        except OSError as error:
            failure, why = DiskFailure.ERROR, str(error)
        self._note_that_it_lives()
        others: dict[BlockHash, str] = {}
        with suppress(OSError):
            if not why_untrusted(self._path, has_contents=False):
                self._empty_abandoned()
                others = self._scan_others()
        return DiskResult(scan=DiskScan(own, strangers, others), failure=failure, why=why)

    def write(self, write: DiskWrite) -> DiskResult:
        """Remove and write; the first error ends it."""
        num_done = 0
        try:
            for name in write.removed:
                self._remove(name)
            for host_block_id, block_hash in zip(write.host_block_ids, write.hashes, strict=True):
                block = np.ascontiguousarray(self._host[:, :, host_block_id])
                self._write_block(block_hash, block.reshape(-1).data)
                num_done += 1
        except OSError as error:
            return DiskResult(num_done, failure=DiskFailure.ERROR, why=str(error))
        return DiskResult(num_done)

    def read(self, read: DiskRead) -> DiskResult:
        """Read blocks, up to one that is not there, not right or cannot be read."""
        num_done = 0
        try:
            for host_block_id, block_hash, folder in zip(
                read.host_block_ids, read.hashes, read.folders, strict=True
            ):
                path = self._block_path(folder or self._own, block_hash)
                block = self._read_block(path, block_hash)
                pieces = self._host[:, :, host_block_id]
                pieces[...] = block.reshape(pieces.shape)
                num_done += 1
        except FileNotFoundError as error:
            return DiskResult(num_done, failure=DiskFailure.VANISHED, why=str(error))
        except CorruptFile as error:
            with suppress(OSError):
                self._calls.remove(path)
            return DiskResult(num_done, failure=DiskFailure.CORRUPT, why=f"{path}: {error}")
        except OSError as error:
            return DiskResult(num_done, failure=DiskFailure.ERROR, why=str(error))
        return DiskResult(num_done)

    def close(self) -> None:
        """Leave this node's folder to the next process."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._calls.close(lock)  # also where it fails: its number may be another file's then

    # --- folders --------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Find or make this node's folder; raises `OSError`."""
        self.close()
        self._calls.make_folder(self._path)
        problem = why_untrusted(self._path, has_contents=False)
        if problem:
            raise NoFolder(f"{problem}: wanted a folder that only this user may write")
        refused: OSError | None = None
        for number in range(MOST_FOLDERS):
            try:
                if self._take(f"node-{number}"):
                    return
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                refused = refused or error
        raise refused or NoFolder(f"{MOST_FOLDERS} nodes have a folder in {self._path}")

    def _take(self, name: str) -> bool:
        """Make a folder this node's, unless another one has it. Raises `OSError`."""
        top = self._path / name
        self._make_folder(top)
        lock = self._calls.lock(top / _LOCK)
        if lock is None:
            return False
        self._own, self._lock = name, lock
        try:
            self._make_folder(self._folder_path(name))
            self._check_own()
        except OSError:
            self.close()
            raise
        return True

    def _make_folder(self, path: Path) -> None:
        """Make a folder unless there is one. What a link leads to is not below `self._path`."""
        self._calls.make_folder(path)
        if not self._calls.is_folder(path):
            raise FileExistsError(errno.EEXIST, "a link is in the place of a folder", str(path))

    def _check_own(self) -> None:
        """Raise `NoFolder` unless this node's folder is its own, and let go of it if it is not.

        The lock is that of a file. Where its folder was removed or replaced, another node locks
        another file in the same place. While a descriptor is open nothing else gets its number.
        """
        if self._lock is None:
            raise NoFolder("this node has no folder on disk")
        top, home = self._path / self._own, self._folder_path(self._own)
        is_there = self._calls.is_folder(top) and self._calls.is_folder(home)
        if not (is_there and self._calls.is_at(top / _LOCK, self._lock)):
            self.close()
            raise NoFolder(f"{home} was removed or replaced while this node had it")

    def _note_that_it_lives(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._calls.note_use(self._lock)

    def _empty_abandoned(self) -> None:
        """Remove files of nodes that are gone for good, whose folders nobody else would bound.

        The node that has the lock of a folder notes it with each look, so the age of the lock file
        says for how long there was none. The lock is held meanwhile: a node that starts takes
        another folder. Where nothing is left in it, the folder counts as new.
        """
        num_left = MOST_EMPTIED
        with suppress(OSError):
            for name in self._calls.folders(self._path):
                if name != self._own and num_left > 0 and self._is_abandoned(name):
                    num_left -= self._empty(name, num_left)

    def _is_abandoned(self, name: str) -> bool:
        since_ns = self._calls.now_ns() - ABANDONED_NS
        locks = [one for one in self._calls.files(self._path / name) if one.name == _LOCK]
        return any(one.used_at_ns < since_ns for one in locks)

    def _empty(self, name: str, most: int) -> int:
        """Remove at most so many files of a folder that nobody has; return how many."""
        top = self._path / name
        lock = self._calls.lock(top / _LOCK)
        if lock is None:
            return 0
        try:
            if not self._is_abandoned(name):
                return 0  # another node had it since
            names = [
                top / one / seen
                for one in self._calls.folders(top)
                for seen in self._blocks(top / one)
            ]
            for path in names[:most]:
                with suppress(FileNotFoundError):
                    self._calls.remove(path)
            if len(names) <= most:
                self._calls.note_use(lock)
            return min(len(names), most)
        finally:
            self._calls.close(lock)

    def _blocks(self, folder: Path) -> list[str]:
        """Return the names of what this program has written into a folder."""
        names = self._calls.names(folder)
        return [one for one in names if any(_hash_in(one, kind) for kind in (_BLOCK, _NEW))]

    def _scan_own(self) -> tuple[tuple[BlockHash, ...], tuple[tuple[str, int], ...]]:
        """Return this node's blocks by use, and what else is there; remove what is no whole file.

        Raises `OSError`.
        """
        own: list[tuple[int, BlockHash]] = []
        strangers: list[tuple[int, str, int]] = []
        top = self._path / self._own
        for folder in self._calls.folders(top):
            is_ours = folder == self._name
            for seen in self._calls.files(top / folder):
                block_hash = _hash_in(seen.name, _BLOCK)
                is_whole = not is_ours or seen.num_bytes == self.file_bytes
                if block_hash is None:
                    if _hash_in(seen.name, _NEW) is not None:
                        self._calls.remove(top / folder / seen.name)
                elif not is_whole:
                    self._calls.remove(top / folder / seen.name)
                elif is_ours:
                    own.append((seen.used_at_ns, block_hash))
                else:
                    name = f"{folder}/{seen.name}"
                    strangers.append((seen.used_at_ns, name, seen.num_bytes))
        return (
            tuple(block_hash for _, block_hash in sorted(own)),
            tuple((name, size) for _, name, size in sorted(strangers)),
        )

    def _scan_others(self) -> dict[BlockHash, str]:
        """Return blocks in the folders of other nodes. Raises `OSError`."""
        found: dict[BlockHash, str] = {}
        for name in self._calls.folders(self._path):
            if name == self._own and self._lock is not None:
                continue
            with suppress(OSError):
                for one in self._calls.names(self._folder_path(name)):
                    block_hash = _hash_in(one, _BLOCK)
                    if block_hash is not None and len(found) < MOST_BLOCKS_SEEN:
                        found[block_hash] = name
        return found

    # --- files ----------------------------------------------------------------------------------

    def _write_block(self, block_hash: BlockHash, block: memoryview) -> None:
        self._check_own()
        path = self._block_path(self._own, block_hash)
        new = path.with_suffix(_NEW)
        content = block
        if self._seal is not None:
            fields = header_fields(self._fingerprint, block_hash, self._content.nbytes)
            content = memoryview(self._seal.seal(block, fields))
        fd = self._calls.open_new(new)
        try:
            try:
                header = file_header(self._fingerprint, block_hash, content)
                self._write_all(fd, memoryview(header))
                self._write_all(fd, content)
                self._calls.sync(fd)
            finally:
                self._calls.close(fd)
            self._calls.rename(new, path)
        except OSError:
            with suppress(OSError):
                self._calls.remove(new)
            raise

    def _write_all(self, fd: int, left: memoryview) -> None:
        while left:
            num_written = self._calls.write(fd, left)
            if num_written == 0:
                raise OSError("nothing was written")
            left = left[num_written:]

    def _read_block(self, path: Path, block_hash: BlockHash) -> np.ndarray:
        """Return a block, until the next one is read. Raises `OSError`, `CorruptFile`."""
        header, content = bytearray(HEADER_BYTES), self._content.data
        fd = self._calls.open_old(path)
        try:
            if not self._calls.is_own(fd):
                raise CorruptFile("another user may have written it")
            self._read_all(fd, memoryview(header))
            self._read_all(fd, content)
            if self._calls.read(fd, memoryview(bytearray(1))):
                raise CorruptFile("it is too long")
            check_file(bytes(header), self._fingerprint, block_hash, content)
            with suppress(OSError):
                self._calls.note_use(fd)
        finally:
            self._calls.close(fd)
        if self._seal is None:
            return self._content
        fields = header_fields(self._fingerprint, block_hash, content.nbytes)
        return np.frombuffer(self._seal.open(content, fields), np.uint8)

    def _read_all(self, fd: int, into: memoryview) -> None:
        while into:
            num_read = self._calls.read(fd, into)
            if num_read == 0:
                raise CorruptFile("it is too short")
            into = into[num_read:]

    def _remove(self, name: FileName) -> None:
        self._check_own()
        if isinstance(name, str):
            path = self._path / self._own / name
        else:
            path = self._block_path(self._own, name)
        with suppress(FileNotFoundError):
            self._calls.remove(path)

    def _folder_path(self, folder: str) -> Path:
        return self._path / folder / self._name

    def _block_path(self, folder: str, block_hash: BlockHash) -> Path:
        return self._folder_path(folder) / (block_hash.hex() + _BLOCK)


def file_bytes(block_bytes: int, *, is_sealed: bool) -> int:
    """Return the length of the file of a block."""
    return HEADER_BYTES + block_bytes + (SEAL_BYTES if is_sealed else 0)


def _hash_in(name: str, suffix: str) -> BlockHash | None:
    """Return the hash that the name of a file of this kind says; None: it is another file."""
    if not name.endswith(suffix) or len(name) != _HASH_LETTERS + len(suffix):
        return None
    try:
        return bytes.fromhex(name.removesuffix(suffix))
    except ValueError:
        return None
