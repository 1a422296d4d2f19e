"""The policy served inside vLLM; the only room that knows vLLM's internals."""
