"""Agents and evaluators in processes of their own, which may hang, leak or crash without harm to the run.

`pool` gives work to the `processes` of the workers, `answering` does for them what only the run can, `zygote` forks
them, and `messages` is what both sides say. `jaxft.harness.worker` is what a worker does.
"""
