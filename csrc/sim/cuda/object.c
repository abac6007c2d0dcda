/* object.c: see sim.h. Objects of one type come from a free list that only grows; a context knows its children. */
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

#define MAGIC(type) (0xc0da0000u | (uint32_t)(type))

pthread_mutex_t api_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lists_lock = PTHREAD_MUTEX_INITIALIZER; /* innermost of all */
static struct { struct object *first, *last; } unused[OBJ_TYPES];

bool object_is(const void *pointer, enum object_type type)
{
    const struct object *object = pointer;
    return object && ((uintptr_t)object & 7) == 0 && (uintptr_t)object > 4096 &&
        load_relaxed(&object->magic) == MAGIC(type);
}

static void link_child(struct object *object, struct CUctx_st *ctx)
{
    object->ctx = ctx;
    object->prev = NULL;
    object->next = ctx->children;
    if (ctx->children)
        ctx->children->prev = object;
    ctx->children = object;
}

static void unlink_child(struct object *object)
{
    if (object->prev)
        object->prev->next = object->next;
    else
        object->ctx->children = object->next;
    if (object->next)
        object->next->prev = object->prev;
}

void *object_new(enum object_type type, size_t size, struct CUctx_st *ctx)
{
    if (ctx && ctx->green && type != OBJ_STREAM)
        ctx = ctx->gpu->primary;
    pthread_mutex_lock(&lists_lock);
    struct object *object = unused[type].first;
    if (object) {
        unused[type].first = object->next;
        if (!object->next)
            unused[type].last = NULL;
        memset(object, 0, size);
    } else {
        object = calloc(1, size);
    }
    if (object) {
        object->magic = MAGIC(type);
        object->type = type;
        if (ctx)
            link_child(object, ctx);
    }
    pthread_mutex_unlock(&lists_lock);
    return object;
}

void object_hide(void *pointer)
{
    struct object *object = pointer;
    pthread_mutex_lock(&lists_lock);
    store_relaxed(&object->magic, 0);
    if (object->ctx)
        unlink_child(object);
    object->ctx = NULL;
    object->next = object->prev = NULL;
    pthread_mutex_unlock(&lists_lock);
}

void object_move(void *object, struct CUctx_st *ctx)
{
    pthread_mutex_lock(&lists_lock);
    unlink_child(object);
    link_child(object, ctx);
    pthread_mutex_unlock(&lists_lock);
}

/* The oldest freed is used first again, so that a stale handle stays stale for long. */
void object_recycle(void *pointer)
{
    struct object *object = pointer;
    pthread_mutex_lock(&lists_lock);
    if (unused[object->type].last)
        unused[object->type].last->next = object;
    else
        unused[object->type].first = object;
    unused[object->type].last = object;
    pthread_mutex_unlock(&lists_lock);
}

void object_free(void *object)
{
    object_hide(object);
    object_recycle(object);
}
