"""OpenAI's API around the policy: what serves it to clients, and the remote models that agents call beside it."""
