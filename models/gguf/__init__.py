"""GGUF, llama.cpp's files: their headers, and the configuration, tokenizer and tensors of the models that they hold.

A file becomes what a Hugging Face folder has: the dict of a `config.json`, tensors under that family's names, a tokenizer. The
loader does the rest. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
