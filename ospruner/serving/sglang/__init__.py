"""The policy served inside SGLang; only this room knows SGLang's internals."""
