"""The slow, obvious way: one slot at a time, in numpy."""

import numpy as np


def commit(cache, new, src, dst):
    """One cache of `api.kv_commit`, as a numpy array."""
    cache, new, dst = np.array(cache), np.asarray(new), np.asarray(dst)
    batch, _, capacity, _ = cache.shape
    block = new.shape[1]
    src = np.tile(np.arange(block), (batch, 1)) if src is None else np.asarray(src)
    count = src.shape[1]
    for row in range(batch):
        if dst.ndim == 1:
            start = dst[row] + (capacity if dst[row] < 0 else 0)
            slots = min(max(start, 0), capacity - count) + np.arange(count)
        else:
            slots = np.where(dst[row] < 0, dst[row] + capacity, dst[row])
        for m, slot in enumerate(slots):
            node = src[row, m] + (block if src[row, m] < 0 else 0)
            if 0 <= slot < capacity:
                cache[row, :, slot] = new[row, min(max(node, 0), block - 1)].astype(cache.dtype)
    return cache
