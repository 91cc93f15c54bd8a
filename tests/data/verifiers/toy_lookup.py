"""A taskset with a tool server for each episode."""

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class FactsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "facts"

    @vf.tool
    def lookup(self, name: str) -> str:
        """Look up a fact."""
        return {"ada": "maths"}.get(name, "unknown")


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupTask(vf.Task[vf.TaskData, vf.State, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [FactsToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "maths")


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        yield LookupTask(vf.TaskData(prompt="ada"), self.config.task)


if __name__ == "__main__":
    FactsToolset.run()
