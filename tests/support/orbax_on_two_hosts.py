"""One of two processes that save a model together as an Orbax checkpoint and restore it onto another mesh.

`python orbax_on_two_hosts.py FOLDER PORT INDEX`: reads FOLDER/plain and the same model in FOLDER/maxtext, writes
FOLDER/orbax, and prints a line of JSON.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


def main(folder, port, index):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(index))

    from specjax import models
    from specjax.sharding import make_mesh

    home = Path(folder)
    wide = models.load(home / "plain", dtype="float32", mesh=make_mesh("model=8"))
    models.save(home / "orbax", wide.lm, wide.params, eos_ids=wide.eos_ids, layout="orbax")
    again = models.load(home / "orbax", dtype="float32", mesh=make_mesh("data=4,model=2"))
    plain = models.load(home / "plain", dtype="float32")
    same = 0
    for ours, wanted in zip(jax.tree.leaves(again.params), jax.tree.leaves(plain.params), strict=True):
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(wanted)[shard.index])
            same += 1
    other = models.load(home / "maxtext", dtype="float32", mesh=make_mesh("model=8"), config=home / "plain")
    for ours, wanted in zip(jax.tree.leaves(other.params), jax.tree.leaves(wide.params), strict=True):
        assert ours.sharding == wanted.sharding
        for one, two in zip(ours.addressable_shards, wanted.addressable_shards, strict=True):
            np.testing.assert_allclose(one.data, two.data, rtol=1e-5, atol=1e-6)
    refused = ""
    try:
        models.save(home / "one-file", wide.lm, wide.params)
    except models.ModelError as error:
        refused = str(error)
    whole = sorted(file.name for file in (home / "orbax").glob("params.crc32.*"))
    chunks = max((home / "orbax" / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    content, damaged = chunks.read_bytes(), ""
    multihost_utils.sync_global_devices("read")
    if index == "0":
        chunks.write_bytes(bytes(9) + content[9:])
    multihost_utils.sync_global_devices("damaged")
    try:
        models.load(home / "orbax", mesh=make_mesh("data=4,model=2"))
    except models.ModelError as error:
        damaged = str(error)
    multihost_utils.sync_global_devices("refused")
    if index == "0":
        chunks.write_bytes(content)
    said = {"copies": wide.lm.kv_copies, "same": same, "refused": refused, "checksums": whole, "damaged": damaged}
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
