"""Hidden states are kept in order, found again after a prefix hit, and dropped when read or when space runs out."""

from __future__ import annotations

import pytest
import torch

from headway.drafters.core.features import FeatureStore, FeatureTrack

TOKENS = list(range(100, 200))


def states(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers whose rows say their position."""
    rows = torch.arange(start, stop, dtype=torch.float32)[:, None]
    return rows.repeat(1, 3), -rows.repeat(1, 3)


def positions(hidden: tuple[torch.Tensor, ...]) -> list[int]:
    assert torch.equal(hidden[0], -hidden[1])
    return hidden[0][:, 0].int().tolist()


@pytest.mark.parametrize("sizes", [[10, 1, 1, 3], [1] * 15, [15], [4, 4, 4, 3], [3, 9, 3]])
@pytest.mark.parametrize("read_at", [0, 1, 2])
def test_every_position_is_read_once_in_order(sizes: list[int], read_at: int) -> None:
    track = FeatureTrack(FeatureStore(4, 1 << 20))
    seen, end = [], 0
    for step, size in enumerate(sizes):
        track.add(end, states(end, end + size), TOKENS)
        end += size
        if read_at and step % read_at == 0:
            seen += positions(track.take())
    if track.kept < track.end:
        seen += positions(track.take())
    assert seen == list(range(15))
    assert (track.begin, track.end) == (0, 15)


def test_known_positions_are_skipped_after_a_preemption() -> None:
    track = FeatureTrack(FeatureStore(4, 1 << 20))
    track.add(0, states(0, 9), TOKENS)
    assert positions(track.take()) == list(range(9))
    track.add(0, states(0, 6), TOKENS)
    track.add(6, states(6, 11), TOKENS)
    assert positions(track.take()) == [9, 10]


@pytest.mark.parametrize("written", [1, 12])
def test_a_prefix_hit_takes_blocks_from_the_store(written: int) -> None:
    store = FeatureStore(4, 1 << 20)
    first = FeatureTrack(store)
    for start in range(0, 12, written):
        first.add(start, states(start, start + written), TOKENS)
    again = FeatureTrack(store)
    again.add(8, states(8, 10), TOKENS)
    assert again.begin == 0
    assert positions(again.take()) == list(range(10))


def test_other_tokens_are_another_prefix() -> None:
    store = FeatureStore(4, 1 << 20)
    FeatureTrack(store).add(0, states(0, 12), TOKENS)
    other = FeatureTrack(store)
    other.add(8, states(8, 10), [7, *TOKENS[1:]])
    assert other.begin == 8
    assert positions(other.take()) == [8, 9]
    salted = FeatureTrack(store, b"another salt")
    salted.add(8, states(8, 10), TOKENS)
    assert salted.begin == 8
    unaligned = FeatureTrack(store)
    unaligned.add(7, states(7, 10), TOKENS)
    assert unaligned.begin == 7


def test_a_sequence_that_began_late_still_files_its_full_blocks() -> None:
    store = FeatureStore(4, 1 << 20)
    late = FeatureTrack(store)
    for position in range(6, 20):
        late.add(position, states(position, position + 1), TOKENS)
    assert len(store) == 3
    assert positions(late.take()) == list(range(6, 20))


def test_the_store_keeps_to_its_size_and_drops_the_oldest() -> None:
    block = 2 * 4 * 3 * 4
    store = FeatureStore(4, 2 * block)
    FeatureTrack(store).add(0, states(0, 12), TOKENS)
    assert (len(store), store.num_bytes) == (2, 2 * block)
    gone = FeatureTrack(store)
    gone.add(8, states(8, 9), TOKENS)
    assert gone.begin == 8
    none = FeatureStore(4, 0)
    FeatureTrack(none).add(0, states(0, 12), TOKENS)
    assert (len(none), none.num_bytes) == (0, 0)


def test_a_long_pause_does_not_hold_the_tensors_of_every_step() -> None:
    track = FeatureTrack(FeatureStore(4, 0))
    for position in range(50):
        step = torch.zeros(64, 3)   # a step with many other rows
        track.add(position, (step[:1], step[1:2]), list(range(50)))
    held = sum(layer.untyped_storage().nbytes() for _, hidden in track._pieces for layer in hidden)
    assert held < 50 * 2 * 3 * 4 + 4 * 2 * 64 * 3 * 4
