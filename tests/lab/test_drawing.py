from pathlib import Path

import numpy as np
import pytest

from kvsieve.kernels.backends import make_backend
from kvsieve.lab import drawing
from kvsieve.lab.drawing import NOT_LOADED, READ, UNUSED, draw_masks
from kvsieve.lab.experiment import Experiment, Tensors


def color(name: str) -> list[int]:
    return [int(name[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("broken", [None, "diagonal"])
def test_squares_have_the_color_of_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken
) -> None:
    pytest.importorskip("matplotlib")
    figures = []
    write = drawing.write_figure
    monkeypatch.setattr(
        drawing, "write_figure", lambda figure, path: (figures.append(figure), write(figure, path))
    )
    run = Experiment(tensors=Tensors.drawn(7), backend=make_backend("reference"), broken=broken)
    path = tmp_path / "masks.png"
    draw_masks(run, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    tokens, blocks, useful = (axis.images[0].get_array() for axis in figures[0].axes)
    for query, token in np.ndindex(24, 24):
        read, loaded = run.mask[query, token], run.loaded[query, token]
        assert list(tokens[query, token]) == color(READ if read else NOT_LOADED)
        want = READ if read else UNUSED if loaded else NOT_LOADED
        assert list(useful[query, token]) == color(want)
    for tile in range(6):
        row = [list(square) == color(READ) for square in blocks[tile]]
        assert np.flatnonzero(row).tolist() == run.block_mask.blocks(0, tile).tolist()
    crosses = [len(part.get_offsets()) for part in figures[0].axes[0].collections]
    assert (sum(crosses) > 0) == (broken == "diagonal")
