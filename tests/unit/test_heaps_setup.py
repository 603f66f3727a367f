"""launch/setup.sh and OpenSHMEM: who gets it, how, and what is said where it cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "env", "dirname", "cat", "sha256sum", "cut", "grep", "rm", "cp")
PACKAGES = "openmpi-bin libopenmpi-dev"


class Machine:
    """A folder with the script, a stand-in for Python, and nothing else on PATH."""

    def __init__(self, folder: Path, user: int, apt_get: str | None) -> None:
        self.folder, self.commands = folder, folder / "commands"
        for name in ("launch", "commands", ".venv/bin"):
            (folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "setup.sh", folder / "launch")
        for name in ("pyproject.toml", "constraints.txt"):
            (folder / name).write_text("")
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None
            (self.commands / name).symlink_to(found)
        self.command("id", f"echo {user}")
        self.write(folder / ".venv" / "bin" / "python", f'echo "python $*" >> {folder}/calls')
        if apt_get is not None:
            self.command("apt-get", f'echo "apt-get $*" >> {folder}/calls; {apt_get}')

    def command(self, name: str, body: str) -> None:
        self.write(self.commands / name, body)

    def write(self, path: Path, body: str) -> None:
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def set_up(self, extra: str = "dev") -> tuple[str, list[str]]:
        """What the script prints, and the calls it makes of pip and apt-get."""
        calls = self.folder / "calls"
        calls.write_text("")
        result = subprocess.run(
            [str(self.folder / "launch" / "setup.sh"), "--extra", extra],
            capture_output=True,
            text=True,
            timeout=30,
            env={"PATH": str(self.commands)},
        )
        assert result.returncode == 0 and not result.stderr, result.stderr
        lines = calls.read_text().splitlines()
        return result.stdout, [line for line in lines if "install" in line or "update" in line]


def with_oshrun(folder: Path) -> str:
    """An apt-get that installs Open MPI."""
    return f"for name in oshrun oshcc; do cp {folder}/commands/id {folder}/commands/$name; done"


def test_root_gets_open_mpi_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, with_oshrun(tmp_path))
    text, calls = machine.set_up()
    assert f"installing {PACKAGES} with apt-get" in text
    assert calls[1] == f"apt-get install -qq -y --no-install-recommends {PACKAGES}"
    assert calls[2].endswith("--no-build-isolation --no-deps shmem4py") and len(calls) == 3
    assert machine.set_up() == ("", [])
    # An environment that was kept, on a fresh machine.
    (machine.commands / "oshrun").unlink()
    assert len(machine.set_up()[1]) == 2
    assert machine.set_up() == ("", [])


def test_users_who_train_get_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, with_oshrun(tmp_path))
    text, calls = machine.set_up("train")
    assert "apt" not in text and len(calls) == 1 and calls[0].endswith(".[train]")
    assert machine.set_up("train") == ("", [])


@pytest.mark.parametrize(("user", "apt_get"), [(1000, "true"), (0, None)])
def test_without_root_or_apt_get_it_is_said_once(
    tmp_path: Path, user: int, apt_get: str | None
) -> None:
    machine = Machine(tmp_path, user, apt_get)
    text, calls = machine.set_up()
    assert "installing it takes root and apt-get" in text
    assert "tests of OpenSHMEM will be skipped; to try again, remove .venv/no-openshmem" in text
    assert len(calls) == 1 and machine.set_up() == ("", [])


def test_a_failing_apt_get_is_told_with_its_log(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, "echo no network; exit 1")
    text, calls = machine.set_up()
    assert "apt-get failed; .venv/openshmem.log says why" in text
    assert "no network" in (tmp_path / ".venv" / "openshmem.log").read_text()
    assert [call.split()[1] for call in calls[1:]] == ["install", "update"]
    (tmp_path / ".venv" / "no-openshmem").unlink()
    assert len(machine.set_up()[1]) == 2
