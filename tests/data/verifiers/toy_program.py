"""A taskset whose harness starts a program, which asks the model by a stream."""

import sys

import verifiers.v1 as vf

__all__ = ["ProgramHarness", "ProgramTaskset"]

PROGRAM = """
import json, sys, urllib.request
url, key, question = sys.argv[1:]
body = {"model": "policy", "messages": [{"role": "user", "content": question}], "stream": True}
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request).read().decode())
"""


class ProgramTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "four")


class ProgramConfig(vf.TasksetConfig):
    question: str


class ProgramTaskset(vf.Taskset[ProgramTask, ProgramConfig]):
    def load(self):
        yield ProgramTask(vf.TaskData(prompt=self.config.question), self.config.task)


class ProgramHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt], {})
