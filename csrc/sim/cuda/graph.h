/* graph.h: graphs under construction and graphs to be launched. All under api_lock. */
#ifndef CGPU_SIM_GRAPH_H
#define CGPU_SIM_GRAPH_H
#include "cuda/sim.h"

struct CUgraphNode_st {
    struct object object;
    struct CUgraph_st *graph;
    struct node_params params;
    struct CUgraphNode_st **deps;
    size_t deps_count;
    size_t mark;                     /* scratch: place in the order */
    bool disabled;
};

/* Memory of its allocation nodes is taken when the node is made and given back with the last of the graph and what was
 * instantiated from it. (The real driver takes it at launch.) */
struct CUgraph_st {
    struct object object;
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

void graph_unref(struct CUgraph_st *graph);
CUresult graph_steps(struct CUgraph_st *graph, struct step **steps, size_t *count); /* in an order that may run */
bool depends_set(struct CUgraphNode_st ***deps, size_t *count, struct CUgraphNode_st *const *from, size_t n);
#endif
