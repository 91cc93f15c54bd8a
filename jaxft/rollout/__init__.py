"""A live policy: weights, tokenizer and engine behind an asynchronous chat client that records its calls."""
