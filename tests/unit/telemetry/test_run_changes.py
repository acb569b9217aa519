"""What a resumed run changed is on its page, and a damaged history leaves nothing but its damaged lines out."""

from __future__ import annotations

from pathlib import Path

from octetrl.config.load import recipe_from_mapping
from octetrl.run.folder.allowed_changes import changes_between, record_changes
from octetrl.telemetry.report_data import read_run
from octetrl.telemetry.report_page import report_page
from octetrl.telemetry.run_changes import HISTORY_FILE
from tests.unit.telemetry.test_report import make_run


def test_the_page_has_the_changes_in_their_order(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "changed" not in dict(read_run(run).settings)
    tree = {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}, "steps": 30}
    before = recipe_from_mapping(tree | {"trainer": {"optimizer": {"lr": 0.005}}}).model_dump()
    after = recipe_from_mapping(tree | {"trainer": {"optimizer": {"lr": 1e-6}}}).model_dump()
    record_changes(run, 32, changes_between(before, after))
    with (run / HISTORY_FILE).open("a") as file:
        file.write('{"step": "x"}\n{"step": 3, "field": ["a"], "old": 1, "new": 2}\nnot JSON\n')
        file.write('{"step": 35, "field": "wandb\\u001b[31m<b>", "old": null, "new": "y"}\n')
    said = dict(read_run(run).settings)["changed"]
    assert sorted(said.split("; ")) == [
        "trainer.optimizer.lr: 0.005 until step 32, then 1e-06",
        "wandb\\x1b[31m<b>: None until step 35, then y",
    ]
    assert said.endswith("then y")
    page = report_page([read_run(run)])
    assert "trainer.optimizer.lr: 0.005 until step 32, then 1e-06" in page and "[31m<b>" not in page
