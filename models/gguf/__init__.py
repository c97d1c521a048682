"""GGUF, llama.cpp's file format: headers, and the configuration, tokenizer and tensors of the models in the files.

A file is converted to the parts of a Hugging Face folder: the dict of a `config.json`, tensors under that family's
names, and a tokenizer. The loader does the rest. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
