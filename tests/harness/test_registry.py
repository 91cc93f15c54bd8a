import pytest

from jaxft.errors import ConfigError
from jaxft.harness.registry import ComponentConfig, EvaluatorConfig, LLMConfig, Registry, WorkflowConfig, register_llm


class MyConfig(WorkflowConfig, name="mine"):
    size: int = 1


async def factory(config, builder):
    yield None


async def other_factory(config, builder):
    yield None


def test_a_config_names_itself():
    assert MyConfig.type_name == "mine"
    assert MyConfig(size=2).model_dump() == {"_type": "mine", "size": 2}

    class Unnamed(MyConfig):
        pass

    assert Unnamed.type_name is None


def test_a_component_is_found_by_kind_and_name():
    registry = Registry()
    registry.add(MyConfig, factory)
    assert registry.find(WorkflowConfig, "mine").factory is factory
    assert registry.names(WorkflowConfig) == ["mine"]
    with pytest.raises(ConfigError, match="no llm is named 'mine'; registered: none"):
        registry.find(LLMConfig, "mine")
    with pytest.raises(ConfigError, match=r"no workflow is named 'mein'; did you mean 'mine'\?; registered: mine"):
        registry.find(WorkflowConfig, "mein")


def test_a_name_is_given_once_but_a_module_may_come_again():
    registry = Registry()
    registry.add(MyConfig, factory)
    registry.add(MyConfig, factory)
    with pytest.raises(ConfigError) as caught:
        registry.add(MyConfig, other_factory)
    assert "two workflows are named 'mine': factory (" in str(caught.value)
    assert "other_factory (" in str(caught.value) and f"{__file__}:" in str(caught.value)


def test_a_copy_that_was_not_renamed_is_told_from_a_module_that_comes_again():
    """Both are functions of one name in one file; the second would take the place of the first without a word."""

    async def again(config, builder):
        yield

    first = again

    async def again(config, builder):
        yield

    registry = Registry()
    registry.add(MyConfig, first)
    with pytest.raises(ConfigError, match=r"two workflows are named 'mine': .*again \(.*:\d+\) and .*again \(.*:\d+\)"):
        registry.add(MyConfig, again)


def test_what_is_no_component_is_refused():
    registry = Registry()

    class Unnamed(EvaluatorConfig):
        pass

    async def no_generator(config, builder):
        return None

    with pytest.raises(TypeError, match="NoKind is of no kind: derive it from LLMConfig, "):

        class NoKind(ComponentConfig, name="none", factory="m:f"):
            pass

    with pytest.raises(TypeError, match="config_type is MyConfig, which is no LLMConfig"):
        register_llm(config_type=MyConfig)(factory)
    with pytest.raises(TypeError, match=r"write class Unnamed\(EvaluatorConfig, name='...'\)"):
        registry.add(Unnamed, factory)
    with pytest.raises(TypeError, match="with one `yield`"):
        registry.add(MyConfig, no_generator)
