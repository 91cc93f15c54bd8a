import ast

import pytest

from jaxft.errors import ConfigError
from jaxft.harness.config import load_config
from jaxft.harness.new_agent import write_agent


def test_the_files_have_the_name_of_the_folder_and_load(tmp_path):
    written = write_agent(tmp_path / "word_game")
    names = {path.name for path in written}
    assert names >= {"word_game.py", "test_word_game.py", "run.yml", "train.jsonl", "held_out.jsonl", "README.md"}
    for path in written:
        text = path.read_text()
        assert "my_agent" not in text and "MyAgent" not in text
        if path.suffix == ".py":
            ast.parse(text)
    config = load_config(tmp_path / "word_game" / "run.yml")
    assert config.workflow.type_name == "word_game" and config.finetuning.enabled


def test_nothing_is_overwritten(tmp_path):
    folder = tmp_path / "word_game"
    folder.mkdir()
    (folder / "run.yml").write_text("mine")
    with pytest.raises(ConfigError, match=r"run\.yml"):
        write_agent(folder)
    assert [path.name for path in folder.iterdir()] == ["run.yml"] and (folder / "run.yml").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "suggestion"), [("my-agent", "my_agent"), ("json", "json_agent"), ("2048", "agent_2048")]
)
def test_a_name_that_no_module_can_have_is_refused_with_another(name, suggestion, tmp_path):
    with pytest.raises(ConfigError, match=f"'{suggestion}'"):
        write_agent(tmp_path / name)
    assert not (tmp_path / name).exists()
