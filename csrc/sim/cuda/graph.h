/* graph.h: graphs under construction and graphs to be launched. All under api_lock. */
#ifndef CGPU_SIM_GRAPH_H
#define CGPU_SIM_GRAPH_H
#include "cuda/memop.h"

struct CUgraphNode_st {
    struct object object;
    struct CUgraph_st *graph;
    struct node_params params;
    struct CUgraphNode_st **deps;
    size_t deps_count;
    size_t mark;                     /* scratch: place in the order */
    bool disabled;
};

struct CUgraph_st {
    struct object object;
    bool memory;                     /* has, or had, allocation or free nodes: not everything may be done with it */
    unsigned instances;
    struct CUgraphNode_st **nodes;
    size_t count, room;
    unsigned refs;
};

struct step { struct node_params params; struct CUgraphNode_st *node; };
struct CUgraphExec_st {
    struct object object;
    struct CUgraph_st *graph;
    struct step *steps;
    size_t count;
    uint64_t flags;
};

/* graph_memory.c; these take api_lock */
CUresult graph_memory_take(struct CUgraphExec_st *exec, struct CUstream_st *stream);
CUresult graph_memory_queued(struct CUstream_st *stream); /* all of that launch is */
CUresult graph_memory_upload(struct CUgraphExec_st *exec, struct CUstream_st *stream);

void graph_unref(struct CUgraph_st *graph);
void graph_steps_free(struct step *steps, size_t count);
CUresult graph_steps(struct CUgraph_st *graph, struct step **steps, size_t *count); /* in an order that may run */
bool depends_set(struct CUgraphNode_st ***deps, size_t *count, struct CUgraphNode_st *const *from, size_t n);
#endif
