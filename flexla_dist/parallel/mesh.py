"""Process groups out of meshes.

Contract: ranks always come from the group passed in; nothing is remembered here and no world rank
is ever computed with.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from flexla_dist.errors import ShardingError

MeshOrGroup: TypeAlias = DeviceMesh | ProcessGroup


def sequence_group(mesh: MeshOrGroup | None, group: ProcessGroup | None = None) -> ProcessGroup:
    """The group over which a sequence is cut: of a one-dimensional mesh such as `mesh["cp"]`, or
    the
    group itself. Exactly one of the two is given; ShardingError otherwise."""
    if (mesh is None) == (group is None):
        raise ShardingError(
            "give either a mesh or a group"
            + (", not both" if mesh is not None else ': for example mesh=device_mesh["cp"]')
        )
    chosen = group if mesh is None else mesh
    if isinstance(chosen, DeviceMesh):
        if chosen.ndim != 1:
            raise ShardingError(
                f"the sequence is cut over one mesh dim, got a mesh of {chosen.ndim} dims "
                f"{chosen.mesh_dim_names}; pass one of them, for example mesh[{_last(chosen)!r}]"
            )
        chosen = chosen.get_group()
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise ShardingError("this process is not a member of the group that was passed in")
    if not isinstance(chosen, ProcessGroup):
        raise TypeError(
            f"expected a DeviceMesh or a ProcessGroup, got {type(chosen).__name__}; for example "
            'init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]'
        )
    return chosen


def _last(mesh: DeviceMesh) -> str:
    return mesh.mesh_dim_names[-1] if mesh.mesh_dim_names else "cp"


def groups_of(mesh: MeshOrGroup) -> tuple[ProcessGroup, ...]:
    """One group for every dim of a mesh: reducing over each in turn reduces over the whole mesh."""
    if isinstance(mesh, ProcessGroup):
        return (mesh,)
    if isinstance(mesh, DeviceMesh):
        return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    raise TypeError(
        f"expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}; for example the mesh "
        'of ("dp", "cp")'
    )


def size_of(mesh: MeshOrGroup) -> int:
    """Number of ranks of a mesh or group."""
    size = 1
    for group in groups_of(mesh):
        size *= dist.get_world_size(group)
    return size
