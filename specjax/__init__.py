"""specjax: fast language-model decoding as pure, jit-compiled state transitions."""
