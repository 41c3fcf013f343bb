"""The notebook docs/tutorial.ipynb: it is clean, and its cells run in order, in one
namespace of this process. This needs no Jupyter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bayflower.rounds.solo import one_thread

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


def cells(kind: str = "code") -> list[str]:
    """Return the texts of the cells of one kind."""
    content = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_clean_and_small():
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK.stat().st_size < 40_000
    ids = [cell["id"] for cell in content["cells"]]
    assert len(ids) == len(set(ids))
    counts = []
    for cell in content["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            counts.append(cell["execution_count"])
            for output in cell["outputs"]:
                assert output["output_type"] in ("stream", "execute_result")
                assert output.get("name") != "stderr"
            compile("".join(cell["source"]), "cell", "exec")
    assert counts == list(range(1, len(counts) + 1))  # it was run from top to bottom
    for target in re.findall(r"\]\(([\w-]+\.md)\)", "".join(cells("markdown"))):
        assert (NOTEBOOK.parent / target).exists(), target


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    with one_thread():
        for number, text in enumerate(cells()):
            exec(compile(text, f"cell {number}", "exec"), space)
    assert space["result"].accuracy > 0.75
    assert space["page"].exists()
    assert set(space["means"].index) == {"fedmap", "fedavg", "local"}
    assert space["means"]["fedmap"] > space["means"]["fedavg"]  # one model for all is not the best
