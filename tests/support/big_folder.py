"""A folder of about 2 GB whose every number is known by its place, and a program that loads it and says what that took.

As a program: `python big_folder.py FOLDER MESH DTYPE [PORT INDEX COUNT]`; it prints one line of JSON.
"""

import importlib
import json
import sys
import threading
from pathlib import Path

import numpy as np

PERIOD = 1_000_003  # a prime, so that no two rows of a matrix begin alike
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def pattern(dtype):
    """Numbers that bfloat16 holds exactly, in a period that no dimension divides."""
    import ml_dtypes

    numbers = np.random.default_rng(0).standard_normal(PERIOD, np.float32).astype(ml_dtypes.bfloat16)
    return numbers.astype(dtype)


def write(folder, dtype, layers):
    """Writes the folder; every tensor goes on with the pattern where the one before it stopped."""
    from specjax.models import LlamaLM, hf_config, weights
    from specjax.models.byte_ranges import stored_shape

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    lm = LlamaLM(hf_config.from_hf(SHAPE | {"num_hidden_layers": layers}))
    numbers = pattern(dtype)
    code, header, count = {2: "BF16", 4: "F32"}[numbers.itemsize], {}, 0
    import jax

    for path, leaf in jax.tree_util.tree_leaves_with_path(lm.abstract()):
        name, transposed = weights.hf_name(path)
        begin, count = count, count + leaf.size
        shape = list(stored_shape(leaf.shape, transposed))
        offsets = [begin * numbers.itemsize, count * numbers.itemsize]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    tile = np.tile(numbers, 4).view(np.uint8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, count * numbers.itemsize, tile.size):
            file.write(tile[: count * numbers.itemsize - begin])


def check(model, folder, dtype):
    """Compares a few stored rows of every shard with the pattern; returns how many numbers were right."""
    import jax

    from specjax.models import weights
    from specjax.models.tensors import read_folder

    tensors, numbers, right = read_folder(folder), pattern(dtype), 0
    start = min(tensor.offset for tensor in tensors.values())
    copies, width = model.lm.kv_copies, model.lm.config.near.head_dim
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        name, transposed = weights.hf_name(path)
        tensor = tensors[name]
        first = (tensor.offset - start) // tensor.kind.itemsize
        for shard in leaf.addressable_shards:
            spans = [np.arange(size)[part] for part, size in zip(shard.index, leaf.shape, strict=True)]
            if ".k_proj" in name or ".v_proj" in name:  # which head a copy is of
                spans[-1] = spans[-1] // width // copies * width + spans[-1] % width
            data = np.asarray(shard.data)
            rows, columns = (spans[1], spans[0]) if transposed else (spans[0], spans[-1])
            data = data.T if transposed else data
            if len(spans) == 1:
                want = numbers[(first + rows) % PERIOD]
            else:
                some = np.unique(np.linspace(0, len(rows) - 1, 5).astype(int))
                data, rows = data[some], rows[some]
                want = numbers[(first + rows[:, None] * tensor.shape[1] + columns[None]) % PERIOD]
            np.testing.assert_array_equal(data, want.astype(data.dtype), err_msg=name)
            right += data.size
    return right


class Watch(threading.Thread):
    """The largest anonymous memory of this process since it was started, in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.base = self.peak = anonymous()
        self._over = threading.Event()

    def run(self):
        while not self._over.wait(0.003):
            self.peak = max(self.peak, anonymous())

    def stop(self):
        self._over.set()
        self.join()
        self.peak = max(self.peak, anonymous())
        return self.peak - self.base


def anonymous():
    """`RssAnon` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def bytes_read():
    """What this process asked of files and pipes, in bytes."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main(folder, mesh, dtype, port=None, index=0, count=1):
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    if port is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    importlib.import_module("orbax.checkpoint")  # before what is measured
    import specjax.models.loading
    import specjax.sharding

    where = specjax.sharding.make_mesh(mesh or None)
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.local_devices()[0]))
    watch, before = Watch(), bytes_read()
    watch.start()
    model = specjax.models.loading.load(folder, dtype=dtype, mesh=where)
    jax.block_until_ready(model.params)
    read, grown = bytes_read() - before, watch.stop()
    own = sum(shard.data.nbytes for leaf in jax.tree.leaves(model.params) for shard in leaf.addressable_shards)
    right = check(model, Path(folder), dtype) if (Path(folder) / "model.safetensors").exists() else None
    print(json.dumps({"grown": grown, "own": own, "read": read, "right": right, "copies": model.lm.kv_copies}))


if __name__ == "__main__":
    main(*sys.argv[1:])
