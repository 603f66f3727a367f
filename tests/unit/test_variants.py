"""Names, registry, head decays, and the shape of the variants' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexla_dist.errors import SpecError
from flexla_dist.spec import variants
from flexla_dist.spec.variants import get_variant, lightning, retention, variant_names

NAMES = (
    "linear_attn",
    "linear_attn_normalized",
    "retention",
    "lightning",
    "simple_gla",
    "mamba2",
    "gla",
    "hgrn",
    "delta_rule",
    "gated_delta_rule",
    "kda",
)


def test_every_variant_is_found_by_its_name() -> None:
    assert variant_names() == NAMES
    for name in NAMES:
        spec = get_variant(name)
        assert spec.name == name and spec.recurrence is not None


def test_an_unknown_name_meets_the_nearest_one() -> None:
    with pytest.raises(
        SpecError, match=r"no variant named 'gated_delta' \(did you mean 'gated_delta_rule'"
    ):
        get_variant("gated_delta")
    with pytest.raises(SpecError, match="variants: linear_attn, "):
        get_variant(None)  # type: ignore[arg-type]


def test_every_variant_fits_on_a_page() -> None:
    folder = Path(variants.__file__).parent
    for name in NAMES:
        assert len((folder / f"{name}.py").read_text().splitlines()) <= 60, name


def test_queries_and_keys_share_a_head_group_everywhere() -> None:
    for name in NAMES:
        items = get_variant(name).input_specs
        groups = {key: item.group for key, item in items.items()}
        assert all(group == ("qk" if key in ("q", "k") else None) for key, group in groups.items())


def test_decays_are_declared() -> None:
    for name in NAMES:
        items = get_variant(name).input_specs
        assert all(item.log_decay == (key == "g") for key, item in items.items())


def test_head_decays() -> None:
    want = torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128])
    torch.testing.assert_close(retention.head_decay(3).exp(), want)
    got = lightning.head_decay(4, layer_idx=1, num_layers=4)
    torch.testing.assert_close(got, torch.tensor([0.0, -1.5, -3.0, -4.5]))
    assert not lightning.head_decay(4, layer_idx=4, num_layers=4).any()
