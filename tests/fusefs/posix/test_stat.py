"""stat(2), statx(2), statfs(2), access by number."""

from __future__ import annotations

import os
import stat

from posixplaces import Place, opened, outcome


def test_all_ways_to_ask_agree(place: Place, age: str) -> None:
    path = place.aged(age, b"content")
    with opened(path, os.O_RDWR) as fd, opened(place.path, os.O_RDONLY) as directory:
        answers = [os.stat(path), os.lstat(path), os.fstat(fd), os.stat("file", dir_fd=directory)]
    assert len(set(map(tuple, answers))) == 1
    assert stat.S_ISREG(answers[0].st_mode)


def test_inode_numbers_stay(place: Place) -> None:
    path = place.file(content=b"x")
    number = path.stat().st_ino
    place.let_store(path)
    path.rename(place.path / "moved")
    (place.path / "moved").write_bytes(b"again")
    os.truncate(place.path / "moved", 0)
    assert (place.path / "moved").stat().st_ino == number


def test_inode_numbers_are_of_one_device(place: Place) -> None:
    (place.path / "d").mkdir()
    path = place.file()
    assert path.stat().st_dev == (place.path / "d").stat().st_dev == place.path.stat().st_dev
    assert path.stat().st_ino != (place.path / "d").stat().st_ino


def test_missing(place: Place) -> None:
    assert outcome(os.stat, place.path / "missing") == "ENOENT"
    os.symlink("missing", place.path / "dangling")
    assert outcome(os.stat, place.path / "dangling") == "ENOENT"
    assert stat.S_ISLNK(os.lstat(place.path / "dangling").st_mode)
    place.file("f")
    assert outcome(os.stat, place.path / "f" / "x") == "ENOTDIR"
    assert outcome(os.stat, os.fspath(place.path / "f") + "/") == "ENOTDIR"


def test_a_name_that_was_missing_is_found_once_it_is_made(place: Place) -> None:
    path = place.path / "late"
    for _ in range(3):
        assert not path.exists()
        path.write_bytes(b"x")
        assert path.exists()
        path.rename(place.path / "away")
        assert not path.exists()
        os.link(place.path / "away", path)
        assert path.exists()
        path.unlink()
        (place.path / "away").unlink()


def test_file_system(place: Place) -> None:
    for seen in (os.statvfs(place.path), os.statvfs(place.file())):
        assert seen.f_namemax == 255
        assert seen.f_bsize == seen.f_frsize == 4096
        assert 0 < seen.f_bavail <= seen.f_bfree <= seen.f_blocks
        assert 0 < seen.f_favail <= seen.f_ffree <= seen.f_files


def test_block_size(place: Place) -> None:
    assert place.file().stat().st_blksize >= 4096


def test_size_while_it_is_written(place: Place) -> None:
    path = place.path / "growing"
    with opened(path, os.O_CREAT | os.O_WRONLY) as fd:
        for number in range(1, 20):
            os.write(fd, b"x" * 1000)
            assert path.stat().st_size == number * 1000
            assert os.lseek(fd, 0, os.SEEK_END) == number * 1000


def test_empty_files_occupy_nothing(place: Place) -> None:
    path = place.file()
    assert (path.stat().st_size, path.stat().st_blocks) == (0, 0)
    place.let_store()
    assert (path.stat().st_size, path.stat().st_blocks) == (0, 0)
