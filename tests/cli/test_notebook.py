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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_real_kernel_draws_one_bar_for_each_run_and_shows_results(tmp_path):
    """Where Jupyter is installed: a bar that ends full, and tables instead of texts."""
    nbclient = pytest.importorskip("nbclient", exc_type=ImportError)
    pytest.importorskip("ipykernel", exc_type=ImportError)
    from nbformat.v4 import new_code_cell, new_notebook

    how = "'digits', model='linear', rounds=3, num_clients=3, keep=0.2, device='cpu'"
    texts = [
        "import bayflower",
        f"bayflower.fit('fedmap', {how})",
        f"bayflower.compare(['fedavg', 'local'], {how})",
    ]
    notebook = new_notebook(cells=[new_code_cell(text) for text in texts])
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    _, one, both = ([dict(part) for part in cell.outputs] for cell in notebook.cells)
    assert [part["output_type"] for part in one] == ["display_data", "execute_result"]
    assert [part["output_type"] for part in both] == [*["display_data"] * 2, "execute_result"]
    for part in (one[0], *both[:2]):
        assert "<progress value=3 max=3></progress>" in part["data"]["text/html"]
    assert "<b>fedmap on digits: 3 clients" in one[1]["data"]["text/html"]
    assert both[2]["data"]["text/html"].count("<tr>") == 3
