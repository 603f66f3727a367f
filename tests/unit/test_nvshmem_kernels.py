"""Which kernels NVSHMEM must give its state: told by the files that Triton keeps of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexla_dist.comm.heaps.nvshmem_runtime import calls_nvshmem


@pytest.mark.parametrize("kept", ["kernel.ptx", "kernel.cubin"])
def test_either_file_tells(kept: str, tmp_path: Path) -> None:
    path = tmp_path / kept
    path.write_bytes(b"\x7fELF .. nvshmemi_device_state_d ..")
    assert calls_nvshmem({kept: str(path)})
    path.write_bytes(b"\x7fELF .. another_state ..")
    assert not calls_nvshmem({kept: str(path)})


def test_other_files_do_not(tmp_path: Path) -> None:
    path = tmp_path / "kernel.json"
    path.write_text("nvshmemi_device_state_d")
    assert not calls_nvshmem({"kernel.json": str(path)})
