"""The kernels of `few_rows`, which Numba compiles for the CPU that runs them.

XLA calls a function with one structure of its foreign function interface (`xla/ffi/api/c_api.h`), which is read here as words
of eight bytes. The function shares its work among XLA's threads by a block of words: each thread takes the next part until
none is left. The calling thread works too. It waits only for parts that other threads have begun, so no thread waits for one
that waits for it. The last user of a block frees it.
"""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_code: Any = intrinsic  # a checker of types would take `typing` for an argument that callers give
_WORD = ir.IntType(64)
_TASK = "specjax_few_rows_task"
_malloc = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))

NEXT, DONE, USERS, PARTS, BY_OUTPUTS, X, MATRIX, OUT, ROWS, INPUTS, OUTPUTS, WORDS = range(12)
"""The words of a block: the next part; the numbers of parts done, of users and of parts; whether the matrix lies by outputs;
the operands' places; their sizes."""
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS, _ATTRIBUTES, _CALL = 1, 2, 3, 9, 14, 20, 21
"""Words of XLA_FFI_CallFrame, and their number."""
_DESTROY_ERROR, _SCHEDULE, _THREADS = 8, 17, 18
"""Words of XLA_FFI_Api."""
_DATA, _SIZES = 3, 5
"""Words of XLA_FFI_Buffer."""


@_code
def pointer(typing, word):
    """The address that a word holds."""
    return types.voidptr(types.int64), lambda context, builder, _, given: builder.inttoptr(given[0], cgutils.voidptr_t)


@_code
def added(typing, place, by):
    """Adds to a word that threads share, and returns what it was."""

    def code(context, builder, _, given):
        word = builder.inttoptr(given[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", word, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@_code
def called(typing, function, argument):
    """Calls the function at an address with one word."""

    def code(context, builder, _, given):
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), [given[1]])

    return types.int64(types.int64, types.int64), code


@_code
def address(typing, array):
    """Where an array's numbers are."""

    def code(context, builder, signature, given):
        return builder.ptrtoint(make_array(signature.args[0])(context, builder, given[0]).data, _WORD)

    return types.int64(array), code


@_code
def _task_address(typing):
    """Where `_task` is, by its name: its place changes from process to process, and compiled functions are kept."""

    def code(context, builder, _, __):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, _TASK), _WORD)

    return types.int64(), code


@njit(inline="always")
def words(place, count):
    return carray(pointer(place), (count,), np.int64)


@njit(inline="always")
def floats(place, rows, columns):
    return carray(pointer(place), (rows, columns), np.float32)


_BLOCK = 512
"""Outputs at a time. Eight rows of that many numbers stay in a core's first cache while the rows of `x` pass over them."""
_WIDE = 2048
"""Outputs whose sums stay in a core's caches while all inputs are read."""


@njit(fastmath={"contract"}, error_model="numpy")
def _by_inputs(own, lo, hi):
    """Outputs `lo` to `hi` by eight inputs at a time: the matrix is read as eight streams."""
    rows, inputs, outputs = own[ROWS], own[INPUTS], own[OUTPUTS]
    x, w, out = floats(own[X], rows, inputs), floats(own[MATRIX], inputs, outputs), floats(own[OUT], rows, outputs)
    out[:, lo:hi] = 0
    eights = inputs // 8 * 8
    for wide in range(lo, hi, _WIDE):
        last = min(wide + _WIDE, hi)
        for k in range(0, eights, 8):
            for start in range(wide, last, _BLOCK):
                end = min(start + _BLOCK, last)
                w0, w1, w2, w3 = w[k, start:end], w[k + 1, start:end], w[k + 2, start:end], w[k + 3, start:end]
                w4, w5, w6, w7 = w[k + 4, start:end], w[k + 5, start:end], w[k + 6, start:end], w[k + 7, start:end]
                for row in range(rows):
                    a0, a1, a2, a3 = x[row, k], x[row, k + 1], x[row, k + 2], x[row, k + 3]
                    a4, a5, a6, a7 = x[row, k + 4], x[row, k + 5], x[row, k + 6], x[row, k + 7]
                    sums = out[row, start:end]
                    for n in range(end - start):
                        left = a0 * w0[n] + a1 * w1[n] + a2 * w2[n] + a3 * w3[n]
                        sums[n] += left + (a4 * w4[n] + a5 * w5[n] + a6 * w6[n] + a7 * w7[n])
        for k in range(eights, inputs):
            for row in range(rows):
                out[row, wide:last] += x[row, k] * w[k, wide:last]


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _by_outputs(own, lo, hi):
    """Outputs `lo` to `hi`, each one sum over its own row of the matrix."""
    rows, inputs, outputs = own[ROWS], own[INPUTS], own[OUTPUTS]
    x, w, out = floats(own[X], rows, inputs), floats(own[MATRIX], outputs, inputs), floats(own[OUT], rows, outputs)
    fours = lo + (hi - lo) // 4 * 4
    for n in range(lo, fours, 4):
        w0, w1, w2, w3 = w[n], w[n + 1], w[n + 2], w[n + 3]
        for row in range(rows):
            a = x[row]
            s0 = s1 = s2 = s3 = np.float32(0)
            for k in range(inputs):
                s0 += a[k] * w0[k]
                s1 += a[k] * w1[k]
                s2 += a[k] * w2[k]
                s3 += a[k] * w3[k]
            out[row, n], out[row, n + 1], out[row, n + 2], out[row, n + 3] = s0, s1, s2, s3
    for n in range(fours, hi):
        for row in range(rows):
            a, b = x[row], w[n]
            s = np.float32(0)
            for k in range(inputs):
                s += a[k] * b[k]
            out[row, n] = s


def _compiled(signature: Any) -> Any:
    """`numba.cfunc`, whose results are kept in a folder if there is one that can be written."""

    def compiled(function):
        try:
            return cfunc(signature, cache=True)(function)
        except RuntimeError:
            return cfunc(signature)(function)

    return compiled


@njit
def _release(block):
    if added(block + 8 * USERS, -1) == 1:
        _free(block)


@njit
def _work(block):
    own = words(block, WORDS)
    outputs, parts = own[OUTPUTS], own[PARTS]
    width = -(-outputs // (16 * parts)) * 16  # whole cache lines
    while True:
        part = added(block + 8 * NEXT, 1)
        if part >= parts:
            return
        lo, hi = min(outputs, part * width), min(outputs, part * width + width)
        if own[BY_OUTPUTS]:
            _by_outputs(own, lo, hi)
        else:
            _by_inputs(own, lo, hi)
        added(block + 8 * DONE, 1)


@_compiled(types.void(types.int64))
def _task(block):
    """What another thread of XLA runs."""
    _work(block)
    _release(block)


binding.add_symbol(_TASK, _task.address)


@njit
def _asked(api, question, request):
    """Whether a function of XLA's interface has answered; what it complains of is dropped."""
    error = called(api[question], address(request))
    if error != 0:
        thrown = np.zeros(3, np.int64)
        thrown[0], thrown[2] = 24, error
        called(api[_DESTROY_ERROR], address(thrown))
    return error == 0


@njit
def _threads(api, context):
    count, request = np.ones(1, np.int64), np.zeros(4, np.int64)
    request[0], request[2], request[3] = 32, context, address(count)
    return count[0] if _asked(api, _THREADS, request) else 1


@njit
def _of_call(frame):
    """A new block for a call's operands and result, all matrices; its parts and users are left out."""
    arguments, results = words(frame[_ARGUMENTS], 2), words(frame[_RESULTS], 1)
    x, matrix, out = words(arguments[0], 6), words(arguments[1], 6), words(results[0], 6)
    scalar = words(words(frame[_ATTRIBUTES], 1)[0], 2)
    block = _malloc(8 * WORDS)
    rows, columns, own = words(x[_SIZES], 2), words(out[_SIZES], 2), words(block, WORDS)
    own[NEXT] = own[DONE] = 0
    own[BY_OUTPUTS] = words(scalar[1], 1)[0]
    own[X], own[MATRIX], own[OUT] = x[_DATA], matrix[_DATA], out[_DATA]
    own[ROWS], own[INPUTS], own[OUTPUTS] = rows[0], rows[1], columns[1]
    return block


@njit
def _is_question(frame):
    """Whether XLA only asks for the version of its interface, which is then answered."""
    if frame[_EXTENSION] == 0:
        return False
    extension = words(frame[_EXTENSION], 4)
    if extension[1] & 0xFFFFFFFF != 1:
        return False
    metadata = words(extension[3], 4)
    metadata[3] = 1 << 32  # version 0.1: the oldest with these structures
    return True


@_compiled(types.int64(types.voidptr))
def _handler(call):
    """What XLA calls."""
    frame = carray(call, (_CALL,), np.int64)
    if _is_question(frame):
        return 0
    api = words(frame[_API], 19)
    block = _of_call(frame)
    own = words(block, WORDS)
    parts = _threads(api, frame[_CONTEXT])
    own[USERS] = parts
    own[PARTS] = parts * 4
    request = np.zeros(5, np.int64)
    request[0], request[2], request[3], request[4] = 40, frame[_CONTEXT], _task_address(), block
    for _ in range(parts - 1):
        if not _asked(api, _SCHEDULE, request):
            _release(block)
    _work(block)
    while added(block + 8 * DONE, 0) < own[PARTS]:
        pass
    _release(block)
    return 0


def _register() -> None:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    jax.ffi.register_ffi_target("specjax_few_rows", capsule(_handler.address, None, None), platform="cpu")


_register()


def dot(x: jax.Array, matrix: jax.Array, by_outputs: bool) -> jax.Array:
    """`[M, E]` times `[E, F]`, or `[F, E]` by outputs: `[M, F]`."""
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0 if by_outputs else 1]), jnp.float32)
    return jax.ffi.ffi_call("specjax_few_rows", shape)(x, matrix, by_outputs=np.int64(by_outputs))
