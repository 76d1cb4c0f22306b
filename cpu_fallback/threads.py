"""How many threads a parallel region uses, settable inside compiled code.

numba's own functions for it are addresses of this process inside compiled code, which therefore could not be cached on
disk; these call the same functions of numba's threading layer by name.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I32 = ir.IntType(32)
I64 = ir.IntType(64)


@intrinsic
def get_threads(typingctx):  # type: ignore[no-untyped-def]
    """The threads of the calling thread's next parallel region."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        # The C function returns an int. numba's parallel loops declare it with 64 bits, and one module holds one type.
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), "get_num_threads")
        return builder.sext(builder.trunc(builder.call(function, []), I32), I64)

    return types.int64(), codegen


@intrinsic
def set_threads(typingctx, count):  # type: ignore[no-untyped-def]
    """Let the calling thread's next parallel regions use ``count`` threads, 1 to numba.config.NUMBA_NUM_THREADS."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "set_num_threads")
        builder.call(function, [builder.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
