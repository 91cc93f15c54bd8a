"""A live policy: weights, tokenizer and a sampling engine behind an asynchronous chat client that records what it samples."""
