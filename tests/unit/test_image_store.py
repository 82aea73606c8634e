"""Images are kept by digest: whole, once, and checked when they are read."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.common.errors import DataError, RunFolderError
from tandem.samples.images.store import BoundedImages, ImageFolder


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_bytes_come_back(tmp_path: Path) -> None:
    images = ImageFolder(tmp_path / "run" / "images")
    digest = digest_of(b"picture")
    assert not images.has(digest)
    path = images.put(digest, b"picture")
    assert path == images.folder / digest[:2] / digest
    assert images.has(digest)
    assert images.get(digest) == b"picture"
    assert images.put(digest, b"picture") == path
    assert names(images.folder) == [digest]


def test_a_file_is_linked(tmp_path: Path) -> None:
    source = tmp_path / "a.png"
    source.write_bytes(b"picture")
    link = tmp_path / "link.png"
    link.symlink_to(source)
    images = ImageFolder(tmp_path / "images")
    path = images.put(digest_of(b"picture"), link)
    assert path.samefile(source)
    assert not path.is_symlink()
    source.unlink()
    assert images.get(digest_of(b"picture")) == b"picture"


def test_a_file_of_another_disk_is_copied(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second disk")
    source = other / f"tandem-test-{os.getpid()}.png"
    try:
        source.write_bytes(b"picture")
        images = ImageFolder(tmp_path / "images")
        assert not images.put(digest_of(b"picture"), source).samefile(source)
    finally:
        source.unlink()
    assert images.get(digest_of(b"picture")) == b"picture"


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    images = ImageFolder(tmp_path / "images")
    source = tmp_path / "a.png"
    source.write_bytes(b"other")
    for image in (source, b"other"):
        with pytest.raises(DataError, match=r"is not image [0-9a-f]{12} but [0-9a-f]{12}: it was changed"):
            images.put(digest_of(b"picture"), image)
    assert names(images.folder) == []
    path = images.put(digest_of(b"other"), source)
    source.write_bytes(b"drawn over")  # in place: the link shows it
    with pytest.raises(DataError, match="it was changed since"):
        images.get(path.name)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    images = ImageFolder(tmp_path / "images")
    digest = digest_of(b"picture")
    with pytest.raises(DataError, match=f"image {digest[:12]} is not in"):
        images.get(digest)
    with pytest.raises(RunFolderError, match=r"cannot keep an image in .*: No such file"):
        images.put(digest, tmp_path / "gone.png")
    path = images.path(digest)
    path.mkdir(parents=True)
    with pytest.raises(DataError, match="is a directory, not a file"):
        images.get(digest)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is a FIFO, not a file"):
        images.get(digest)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: it fails in the same call."""
    probe = (
        "import resource, signal, sys, hashlib\n"
        "from pathlib import Path\n"
        "from tandem.common.errors import RunFolderError\n"
        "from tandem.samples.images.store import ImageFolder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "data = bytes(5000)\n"
        "try: ImageFolder(Path(sys.argv[1])).put(hashlib.sha256(data).hexdigest(), data)\n"
        "except RunFolderError as error: print(error)\n"
    )
    folder = tmp_path / "images"
    done = subprocess.run([sys.executable, "-c", probe, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"cannot keep an image in {str(folder)!r}: File too large\n", done.stderr
    assert names(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot keep an image in .*images'"):
        ImageFolder(tmp_path / "images").put(digest_of(b""), b"")


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    """Processes that write the same images, and read each as soon as it is there."""
    probe = (
        "import sys, hashlib\n"
        "from pathlib import Path\n"
        "from tandem.samples.images.store import ImageFolder\n"
        "images = ImageFolder(Path(sys.argv[1]))\n"
        "for number in range(40):\n"
        "    data = bytes([number]) * 200_000\n"
        "    digest = hashlib.sha256(data).hexdigest()\n"
        "    if images.has(digest): assert images.get(digest) == data\n"
        "    images.put(digest, data)\n"
        "    assert images.get(digest) == data\n"
    )
    folder = tmp_path / "images"
    command = [sys.executable, "-c", probe, str(folder)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    assert names(folder) == sorted(digest_of(bytes([number]) * 200_000) for number in range(40))


def test_memory_is_bounded() -> None:
    data = {digest_of(bytes([number])): bytes([number]) * 100 for number in range(5)}
    read: list[str] = []

    def from_disk(digest: str) -> bytes:
        read.append(digest)
        return data[digest]

    held = BoundedImages(from_disk, 300)
    first, second, third, fourth, _ = data
    for digest in (first, second, third, first, fourth):
        assert held.get(digest) == data[digest]
    assert (len(held), held.num_bytes) == (3, 300)
    held.get(first)
    assert read == [first, second, third, fourth]
    held.get(second)
    assert read[-1] == second
    held.put(third, bytes(301))
    assert (len(held), held.num_bytes) == (3, 300)
    with pytest.raises(KeyError):
        held.get("unknown")


def test_threads_may_share_it() -> None:
    data = {digest_of(bytes([number])): bytes([number]) * (50 + number) for number in range(20)}
    held = BoundedImages(data.__getitem__, 400)
    wrong: list[str] = []

    def look() -> None:
        for _ in range(200):
            wrong.extend(digest for digest in data if held.get(digest) != data[digest])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert held.num_bytes == sum(len(data[digest]) for digest in held.digests) <= 400
