"""The notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import os

import pytest

from tests.harness import ROOT


@pytest.mark.matrix
def test_the_notebook_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = {"metadata": {"path": str(ROOT / "examples")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=folder).execute(env=environment)
    said = [
        "".join(output["text"] for output in cell.get("outputs", ()) if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert "1 x 2 devices" in said[0]
    assert "trained: True" in said[2]
    assert "(32, 8)" in said[3]
