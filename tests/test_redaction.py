import io
import json

import pytest

from jaxft.errors import UserCodeError, user_code
from jaxft.redaction import hiding, redacted
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory

SECRET = 'sk-TEST-SENTINEL"\\é\n'


def test_nothing_that_is_written_shown_or_raised_holds_a_secret(tmp_path):
    shown = io.StringIO()
    with hiding([SECRET, ""]), RunDirectory.create(tmp_path / "run") as directory:
        directory.write_json("value.json", {"deep": [{"key": SECRET}], "n": None})
        directory.append_jsonl("rows.jsonl", {"text": f"<{SECRET}>"})
        console = Console(shown)
        console.message(f"key {SECRET} is refused")
        console.episode(SECRET, [{"role": "user", "content": SECRET}])
        with pytest.raises(UserCodeError) as caught, user_code():
            raise ValueError(f"bad key {SECRET!r}, {SECRET}")
    texts = [path.read_text() for path in (tmp_path / "run").glob("*.*")]
    failure = caught.value
    for text in (*texts, shown.getvalue(), str(failure), failure.summary, failure.traceback, failure.tail):
        assert "SENTINEL" not in text
    assert json.loads((tmp_path / "run" / "value.json").read_text()) == {"deep": [{"key": "***"}], "n": None}
    assert failure.summary == "ValueError: bad key '***', ***"


def test_secrets_end_with_their_context_and_short_ones_are_left():
    with hiding(["abcdefgh"]):
        with hiding(["xabcdefghx", "none"]):
            assert redacted("xabcdefghx abcdefgh none") == "*** *** none"
        assert redacted("xabcdefghx") == "x***x"
    assert redacted("abcdefgh") == "abcdefgh"


def test_only_values_are_masked(tmp_path):
    with hiding(["reward_mean", "null"]), RunDirectory.create(tmp_path / "run") as directory:
        directory.write_json("a.json", {"reward_mean": None, "b": "the reward_mean"})
    assert json.loads((tmp_path / "run" / "a.json").read_text()) == {"reward_mean": None, "b": "the ***"}
