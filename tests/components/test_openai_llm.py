"""`_type: openai` in a configuration: what is refused, and where the key is not shown."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from jaxft.components.configs import OpenAILLMConfig
from jaxft.errors import ComponentError
from jaxft.harness.config import config_from_mapping, config_secrets, resolved_yaml
from jaxft.harness.registry import REGISTRY, LLMConfig
from jaxft.rollout.remote import openai_llm

KEY = "sk-TEST-SENTINEL"


def make(config):
    """The client that the factory makes of `llms.helper`."""

    async def main():
        factory = openai_llm(config, SimpleNamespace(config=SimpleNamespace(llms={"helper": config})))
        client = await anext(factory)
        assert await anext(factory, None) is None
        return client

    return asyncio.run(main())


def test_the_client_has_the_fields_of_the_configuration():
    fields = {"base_url": "http://localhost:1/v1", "api_key": KEY, "max_retries": 5, "timeout_seconds": 3.0}
    client = make(OpenAILLMConfig(model="small", **fields))
    assert (client.name, client.model, client.api_key) == ("helper", "small", KEY)
    assert (client.base_url, client.max_retries, client.timeout_seconds) == ("http://localhost:1/v1/", 5, 3.0)


def test_the_key_may_come_from_the_environment_and_is_required(monkeypatch):
    monkeypatch.delenv("OPENAI_ADMIN_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert make(OpenAILLMConfig(model="small")).api_key == KEY
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ComponentError, match=r"llms\.helper\.api_key .*OPENAI_API_KEY"):
        make(OpenAILLMConfig(model="small"))


def test_without_openai_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.delitem(sys.modules, "jaxft.rollout.remote")
    with pytest.raises(ComponentError) as caught:
        REGISTRY.find(LLMConfig, "openai").load("llms.helper (openai)")
    said = str(caught.value)
    assert "\n" not in said and "llms.helper" in said and 'pip install "jaxft[openai]"' in said


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_url", "localhost:8000"), ("max_retries", -1), ("timeout_seconds", 0), ("max_retries", True), ("model", "")],
)
def test_impossible_fields_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        OpenAILLMConfig(**{"model": "small", field: value})


def test_the_resolved_configuration_hides_the_key(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"id": "1", "question": "q"}\n')
    (tmp_path / "agent_without_policy.py").write_text(
        "import jaxft\n"
        "class Config(jaxft.WorkflowConfig, name='agent_without_policy'): pass\n"
        "@jaxft.register_workflow(config_type=Config)\n"
        "async def agent(config, builder):\n"
        "    yield len\n"
    )
    mapping = {
        "imports": ["agent_without_policy.py"],
        "llms": {"helper": {"_type": "openai", "model": "small", "api_key": KEY}},
        "workflow": {"_type": "agent_without_policy"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "data.jsonl"}},
            "evaluators": {"judge": {"_type": "llm_judge", "llm": "helper"}},
        },
    }
    config = config_from_mapping(mapping, base_dir=tmp_path)
    assert KEY in config_secrets(config)
    assert KEY not in resolved_yaml(config) and KEY not in repr(config)
