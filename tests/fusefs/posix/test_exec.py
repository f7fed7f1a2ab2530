"""execve(2) from the file system, and ETXTBSY."""

from __future__ import annotations

import os
import shutil
import subprocess

from posixplaces import USER, Place, opened, outcome


def program(place: Place, age: str, source: str) -> str:
    path = place.path / "program"
    shutil.copyfile(source, path)
    path.chmod(0o755)
    if age == "stored":
        place.let_store(path)
    return os.fspath(path)


def test_a_binary(place: Place, age: str) -> None:
    path = program(place, age, "/bin/echo")
    done = subprocess.run([path, "hello"], capture_output=True, check=True, timeout=30)
    assert done.stdout == b"hello\n"


def test_a_script(place: Place, age: str) -> None:
    path = place.aged(age, b"#!/bin/sh\necho from the script\n")
    path.chmod(0o755)
    assert subprocess.run([path], capture_output=True, check=True, timeout=30).stdout == b"from the script\n"


def test_without_the_right(place: Place) -> None:
    path = place.file(content=b"#!/bin/sh\n", mode=0o644)
    assert outcome(os.execv, path, ["x"]) == "EACCES"


def test_a_running_program_cannot_be_written(place: Place, age: str) -> None:
    path = program(place, age, "/bin/sleep")
    with subprocess.Popen([path, "60"]) as running:
        try:
            assert outcome(os.open, path, os.O_WRONLY) == "ETXTBSY"
            assert outcome(os.truncate, path, 0) == "ETXTBSY"
            os.rename(path, path + "-moved")
            shutil.copyfile("/bin/echo", path)
        finally:
            running.kill()
    assert outcome(os.open, path, os.O_WRONLY) == "ok"


def test_a_file_that_is_written_cannot_be_run(place: Place) -> None:
    path = program(place, "fresh", "/bin/echo")
    with opened(path, os.O_WRONLY):
        said = subprocess.run(
            ["sh", "-c", f"exec {path}"], capture_output=True, text=True, timeout=30, check=False
        )
    assert "busy" in said.stderr.lower()


def test_set_user_id(place: Place) -> None:
    path = program(place, "fresh", "/usr/bin/id")
    os.chown(path, USER, 0)
    os.chmod(path, 0o4755)
    said = place.as_user(
        lambda: subprocess.run(["./program", "-u"], capture_output=True, check=True, timeout=30).stdout,
        uid=1234,
    )
    assert said == b"%d\n" % USER
