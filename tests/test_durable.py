"""Files that two processes write at the same time."""

import os
from pathlib import Path

from lit_layers.files import durable
from lit_layers.files.durable import draft_path, replace_file


def test_two_machines_with_equal_process_ids_can_write_a_file_at_the_same_time(tmp_path: Path, monkeypatch) -> None:
    """Two containers on a shared folder do this: the second starts and ends while the first writes."""
    file, sync, begun = tmp_path / "report.html", durable.sync, []

    def meanwhile(path: Path) -> None:
        sync(path)
        if not begun:
            begun.append(path)
            replace_file(file, "the other's")
            assert file.read_text() == "the other's"

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(durable, "sync", meanwhile)
    replace_file(file, "whole")
    assert begun
    assert file.read_text() == "whole"
    assert [*tmp_path.iterdir()] == [file]


def test_a_draft_is_hidden_next_to_its_file_and_has_its_own_name(tmp_path: Path) -> None:
    for name in ("report.html", ".hidden"):
        drafts = {draft_path(tmp_path / name) for _ in range(100)}
        assert len(drafts) == 100
        assert {draft.parent for draft in drafts} == {tmp_path}
        assert all(draft.name.startswith(f".{name}.") and draft.name.endswith(".draft") for draft in drafts)
