/* graph.c: graphs, their nodes and edges. */
#include <stdlib.h>
#include <string.h>
#include "cuda/graph.h"

struct CUgraph_st *graph_new(void)
{
    struct CUgraph_st *graph = object_new(OBJ_GRAPH, sizeof *graph, NULL);
    if (graph)
        graph->refs = 1;
    return graph;
}

bool depends_set(struct CUgraphNode_st ***deps, size_t *count, struct CUgraphNode_st *const *from, size_t n)
{
    struct CUgraphNode_st **copy = n ? malloc(n * sizeof *copy) : NULL;
    if (n && !copy)
        return false;
    if (n)
        memcpy(copy, from, n * sizeof *copy);
    free(*deps);
    *deps = copy;
    *count = n;
    return true;
}

static void node_free(struct CUgraphNode_st *node)
{
    if (node->params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        graph_forget(node->params.dptr);
    if (node->params.child)
        graph_unref(node->params.child);
    memops_unref(node->params.memops);
    free(node->deps);
    object_free(node);
}

void graph_unref(struct CUgraph_st *graph)
{
    if (--graph->refs)
        return;
    for (size_t i = 0; i < graph->count; i++)
        node_free(graph->nodes[i]);
    free(graph->nodes);
    object_recycle(graph);
}

CUresult graph_add(struct CUgraph_st *graph, const struct node_params *params, struct CUgraphNode_st *const *deps,
                   size_t count,
                   struct CUgraphNode_st **out)
{
    for (size_t i = 0; i < count; i++)
        if (!deps || !object_is(deps[i], OBJ_NODE) || deps[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    if (graph->count == graph->room) {
        size_t room = graph->room ? 2 * graph->room : 16;
        struct CUgraphNode_st **nodes = realloc(graph->nodes, room * sizeof *nodes);
        if (!nodes)
            return CUDA_ERROR_OUT_OF_MEMORY;
        graph->nodes = nodes;
        graph->room = room;
    }
    struct CUgraphNode_st *node = object_new(OBJ_NODE, sizeof *node, NULL);
    if (!node || !depends_set(&node->deps, &node->deps_count, deps, count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->graph = graph;
    node->params = *params;
    graph->nodes[graph->count++] = node;
    graph->memory |= params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || params->type == CU_GRAPH_NODE_TYPE_MEM_FREE;
    if (out)
        *out = node;
    return CUDA_SUCCESS;
}

/* ---- the order ---- */

static CUresult visit(struct CUgraphNode_st *node, struct CUgraphNode_st **order, size_t *n)
{
    if (node->mark == 2)
        return CUDA_SUCCESS;
    if (node->mark == 1)
        return CUDA_ERROR_INVALID_VALUE; /* a cycle */
    node->mark = 1;
    for (size_t i = 0; i < node->deps_count; i++)
        TRY(visit(node->deps[i], order, n));
    node->mark = 2;
    order[(*n)++] = node;
    return CUDA_SUCCESS;
}

static CUresult append_steps(struct CUgraph_st *graph, struct step **steps, size_t *count, size_t *room, int depth)
{
    struct CUgraphNode_st **order = malloc((graph->count + 1) * sizeof *order);
    size_t n = 0;
    CUresult result = order && depth < 16 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->mark = 0;
    for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++)
        result = visit(graph->nodes[i], order, &n);
    for (size_t i = 0; i < n && result == CUDA_SUCCESS; i++) {
        if (order[i]->disabled)
            continue;
        if (order[i]->params.type == CU_GRAPH_NODE_TYPE_GRAPH) {
            result = append_steps(order[i]->params.child, steps, count, room, depth + 1);
            continue;
        }
        if (*count == *room) {
            *room = *room ? 2 * *room : 16;
            struct step *more = realloc(*steps, *room * sizeof *more);
            if (!more) {
                result = CUDA_ERROR_OUT_OF_MEMORY;
                break;
            }
            *steps = more;
        }
        if (order[i]->params.memops)
            order[i]->params.memops->refs++;
        (*steps)[(*count)++] = (struct step){order[i]->params, order[i]};
    }
    free(order);
    return result;
}

CUresult graph_steps(struct CUgraph_st *graph, struct step **steps, size_t *count)
{
    size_t room = 0;
    *steps = NULL;
    *count = 0;
    CUresult result = append_steps(graph, steps, count, &room, 0);
    if (result != CUDA_SUCCESS)
        graph_steps_free(*steps, *count);
    return result;
}

void graph_steps_free(struct step *steps, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memops_unref(steps[i].params.memops);
    free(steps);
}

/* ---- entry points ---- */

API cuGraphCreate(CUgraph *graph, unsigned int flags);
API cuGraphDestroy(CUgraph graph);
API cuGraphClone(CUgraph *clone, CUgraph graph);
API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
API cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
API cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count);
API cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count);
API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type);
API cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *deps, size_t *count);
API cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *deps, CUgraphEdgeData *data, size_t *count);
API cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count);
API cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                              const CUgraphEdgeData *data, size_t count);
API cuGraphDestroyNode(CUgraphNode node);
API cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags);

API cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    CHECK_INIT();
    if (!graph || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = graph_new();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define LOCKED(handle, type) \
    CHECK_INIT(); \
    if (!object_is(handle, type)) \
        return CUDA_ERROR_INVALID_VALUE

API cuGraphDestroy(CUgraph graph)
{
    LOCKED(graph, OBJ_GRAPH);
    pthread_mutex_lock(&api_lock);
    object_hide(graph);
    graph_unref(graph);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuGraphClone(CUgraph *out, CUgraph graph)
{
    LOCKED(graph, OBJ_GRAPH);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct CUgraph_st *clone = graph_new();
    CUresult result = !clone ? CUDA_ERROR_OUT_OF_MEMORY : graph->memory ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
    for (size_t i = 0; i < graph->count; i++)
        graph->nodes[i]->mark = i;
    for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
        struct node_params params = graph->nodes[i]->params;
        if (params.child)
            params.child->refs++;
        if (params.memops)
            params.memops->refs++;
        result = graph_add(clone, &params, NULL, 0, NULL);
    }
    for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
        struct CUgraphNode_st *from = graph->nodes[i], *to = clone->nodes[i];
        if (!depends_set(&to->deps, &to->deps_count, from->deps, from->deps_count))
            result = CUDA_ERROR_OUT_OF_MEMORY;
        for (size_t d = 0; d < to->deps_count; d++)
            to->deps[d] = clone->nodes[to->deps[d]->mark];
    }
    if (result == CUDA_SUCCESS) {
        *out = clone;
    } else if (clone) {
        object_hide(clone);
        graph_unref(clone);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult list_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count, bool roots)
{
    size_t n = 0;
    LOCKED(graph, OBJ_GRAPH);
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; i < graph->count; i++) {
        if (roots && graph->nodes[i]->deps_count)
            continue;
        if (nodes && n < *count)
            nodes[n] = graph->nodes[i];
        n++;
    }
    pthread_mutex_unlock(&api_lock);
    if (!nodes || n < *count)
        *count = n;
    return CUDA_SUCCESS;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    return list_nodes(graph, nodes, count, false);
}

API cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    return list_nodes(graph, nodes, count, true);
}

API cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
{
    size_t n = 0;
    LOCKED(graph, OBJ_GRAPH);
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; i < graph->count; i++) {
        for (size_t d = 0; d < graph->nodes[i]->deps_count; d++, n++) {
            if (!from || !to || n >= *count)
                continue;
            from[n] = graph->nodes[i]->deps[d];
            to[n] = graph->nodes[i];
            if (data)
                data[n] = (CUgraphEdgeData){0};
        }
    }
    pthread_mutex_unlock(&api_lock);
    if (!from || n < *count)
        *count = n;
    return CUDA_SUCCESS;
}

API cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    return cuGraphGetEdges_v2(graph, from, to, NULL, count);
}

API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    LOCKED(node, OBJ_NODE);
    if (!type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->params.type;
    return CUDA_SUCCESS;
}

API cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *deps, CUgraphEdgeData *data, size_t *count)
{
    LOCKED(node, OBJ_NODE);
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; deps && i < node->deps_count && i < *count; i++) {
        deps[i] = node->deps[i];
        if (data)
            data[i] = (CUgraphEdgeData){0};
    }
    if (!deps || node->deps_count < *count)
        *count = node->deps_count;
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *deps, size_t *count)
{
    return cuGraphNodeGetDependencies_v2(node, deps, NULL, count);
}

API cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                              const CUgraphEdgeData *data, size_t count)
{
    CUresult result = CUDA_SUCCESS;
    LOCKED(graph, OBJ_GRAPH);
    (void)data;
    if (count && (!from || !to))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        if (!object_is(from[i], OBJ_NODE) || !object_is(to[i], OBJ_NODE) || from[i]->graph != graph ||
            to[i]->graph != graph) {
            result = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        struct CUgraphNode_st **deps = realloc(to[i]->deps, (to[i]->deps_count + 1) * sizeof *deps);
        if (!deps) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
        to[i]->deps = deps;
        deps[to[i]->deps_count++] = from[i];
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    return cuGraphAddDependencies_v2(graph, from, to, NULL, count);
}

/* Its edges go with it. */
API cuGraphDestroyNode(CUgraphNode node)
{
    LOCKED(node, OBJ_NODE);
    struct CUgraph_st *graph = node->graph;
    if (graph->memory)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&api_lock);
    size_t kept = 0;
    for (size_t i = 0; i < graph->count; i++) {
        struct CUgraphNode_st *other = graph->nodes[i];
        size_t left = 0;
        for (size_t d = 0; d < other->deps_count; d++)
            if (other->deps[d] != node)
                other->deps[left++] = other->deps[d];
        other->deps_count = left;
        if (other != node)
            graph->nodes[kept++] = other;
    }
    graph->count = kept;
    node_free(node);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags)
{
    LOCKED(graph, OBJ_GRAPH);
    (void)path;
    (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}
