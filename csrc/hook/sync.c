/* sync.c: a thread that has waited for its work tells so: what it knows to be done needs no event, and an idle holder lets go
 * after ctl.grace_ns. Nothing here waits or changes a result. */
#include <errno.h>

#include "client.h"
#include "hook.h"
#include "pool.h"
#include "streams.h"

#define SYNC_WRAP(name, args, call, whole, then) \
    CU_WRAP(CUresult, name, args) \
    { \
        CUresult result = REAL(name) call; \
        pools_synced(whole); \
        if (result == CUDA_SUCCESS && gate_self) { \
            int saved = errno; \
            then; /* it may wake the agent */ \
            errno = saved; \
        } \
        return result; \
    }

static void context_synced(CUcontext context)
{
    if (!context || context == gate_self->context)
        streams_synced_context();
    else
        streams_hint();
}

SYNC_WRAP(cuCtxSynchronize, (void), (), true, streams_synced_context())
SYNC_WRAP(cuCtxSynchronize_v2, (CUcontext context), (context), true, context_synced(context))
SYNC_WRAP(cuStreamSynchronize, (CUstream stream), (stream), false, streams_synced(stream_key(stream)))
SYNC_WRAP(cuStreamSynchronize_ptsz, (CUstream stream), (stream), false, streams_synced(stream_key_ptsz(stream)))
SYNC_WRAP(cuStreamQuery, (CUstream stream), (stream), false, streams_synced(stream_key(stream)))
SYNC_WRAP(cuStreamQuery_ptsz, (CUstream stream), (stream), false, streams_synced(stream_key_ptsz(stream)))
SYNC_WRAP(cuEventSynchronize, (CUevent event), (event), false, streams_hint())
SYNC_WRAP(cuEventQuery, (CUevent event), (event), false, streams_hint())

/* ---- streams that go ---- */

CU_WRAP(CUresult, cuStreamDestroy, (CUstream stream))
{
    streams_forget(stream);
    return REAL(cuStreamDestroy)(stream);
}

CU_WRAP(CUresult, cuStreamDestroy_v2, (CUstream stream))
{
    streams_forget(stream);
    return REAL(cuStreamDestroy_v2)(stream);
}

/* ---- the current context ---- */

CU_WRAP(CUresult, cuCtxSetCurrent, (CUcontext context))
{
    CUresult result = REAL(cuCtxSetCurrent)(context);
    if (gate_self && gate_self->context != context)
        gate_context_changed();
    return result;
}

#define CONTEXT_WRAP(name, args, call) \
    CU_WRAP(CUresult, name, args) \
    { \
        CUresult result = REAL(name) call; \
        gate_context_changed(); \
        return result; \
    }

CONTEXT_WRAP(cuCtxPushCurrent, (CUcontext context), (context))
CONTEXT_WRAP(cuCtxPushCurrent_v2, (CUcontext context), (context))
CONTEXT_WRAP(cuCtxPopCurrent, (CUcontext *context), (context))
CONTEXT_WRAP(cuCtxPopCurrent_v2, (CUcontext *context), (context))
