"""The contracts of finetuning (builder, adapter, trainer), their configuration, and the asynchronous runtime."""
