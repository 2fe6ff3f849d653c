"""What an operator sees: the state of all pipelines in one document, its words, and traces of requests."""
