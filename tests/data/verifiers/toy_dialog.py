"""An environment of two turns, whose second question depends on the first answer; and one of two seats."""

import verifiers.v1 as vf

__all__ = ["DialogEnv", "DialogTaskset"]


class DialogConfig(vf.TasksetConfig):
    pass


class DialogTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DialogTaskset(vf.Taskset[DialogTask, DialogConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield DialogTask(vf.TaskData(prompt=None), self.config.task)


class DialogEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class DialogEnv(vf.Env[DialogEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn("A?")
            await interaction.turn(f"{first.last_reply}?")
        interaction.trace.record_reward("played", 0.5)
