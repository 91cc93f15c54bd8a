"""`_type: fabric_agent`: an agent that NeMo Fabric runs, which asks the policy at its episode's own address."""

import os
import sys
import tempfile
from typing import Any

from nemo_fabric import Fabric, FabricConfig
from pydantic import Field
from warm_python import warm_python

import jaxft

ENVIRONMENT = {
    "EPISODE_KEY": "any",  # the address needs no key, but adapters want a variable that holds one
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # mini-SWE-agent else fetches prices when it starts,
    "MSWEA_COST_TRACKING": "ignore_errors",  # and fails where a model has none
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)


class FabricAgentConfig(jaxft.WorkflowConfig, name="fabric_agent"):
    """An agent of NeMo Fabric."""

    llm: jaxft.LLMRef
    agent: dict[str, Any] = Field(description="The FabricConfig; its model gets the address of the episode.")
    preload: list[str] = Field(default=[], description="Modules to import once; none: by each episode's own process.")


@jaxft.register_workflow(config_type=FabricAgentConfig)
async def fabric_agent(config, builder):
    with warm_python(config.preload) if config.preload else tempfile.TemporaryDirectory():
        os.environ.setdefault("ADAPTER_PYTHON", sys.executable)  # Fabric else takes the one below a virtual environment

        async def answer(example):
            agent = FabricConfig.from_mapping(at_address(config.agent, config.llm, jaxft.episode().base_url))
            with tempfile.TemporaryDirectory() as folder:
                result = await Fabric().run(agent, base_dir=folder, input=example["question"])
            if result.error is not None:
                raise RuntimeError(f"{result.error.code}: {result.error.message}")
            return str(result.output["response" if "response" in result.output else "output"])

        yield answer


def at_address(agent: dict[str, Any], model: str, base_url: str) -> dict[str, Any]:
    """The FabricConfig with the model at this address; the remote agent has its address in the settings."""
    own = agent.get("models", {}).get("default", {})
    asked = {"provider": "openai", "model": model, "api_key_env": "EPISODE_KEY"} | own
    harness = agent["harness"]
    if harness["adapter_id"] == "nvidia.fabric.remote-agent":
        harness = harness | {"settings": harness.get("settings", {}) | {"base_url": base_url}}
    else:
        asked["base_url"] = base_url
    return agent | {"harness": harness, "models": agent.get("models", {}) | {"default": asked}}
