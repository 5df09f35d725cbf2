// Graphs, which run in the order in which they were made.

#include "described.h"

long described_graphs_made;
long described_graphs_dropped;
long described_kernel_updates;
long described_child_updates;
long described_copy_updates;
long described_fill_updates;

struct CUgraph_st {
    CUgraphNode first, *last;
};

struct CUgraphExec_st {
    CUgraph graph;
};

CUgraphNode add_node(CUgraph graph, struct op op, CUgraph child) {
    CUgraphNode node = calloc(1, sizeof *node);
    node->op = op;
    node->op.staged = NULL;  // it stays for the next launch
    node->child = child;
    *graph->last = node;
    graph->last = &node->next;
    return node;
}

static CUgraph new_graph(void) {
    CUgraph graph = calloc(1, sizeof *graph);
    graph->last = &graph->first;
    return graph;
}

static CUgraph copy_of(CUgraph graph) {
    CUgraph copy = new_graph();
    for (CUgraphNode node = graph->first; node; node = node->next)
        add_node(copy, node->op, node->child ? copy_of(node->child) : NULL)->original = node;
    return copy;
}

static void free_graph(CUgraph graph) {
    for (CUgraphNode node = graph->first; node;) {
        CUgraphNode next = node->next;
        if (node->child) free_graph(node->child);
        free(node);
        node = next;
    }
    free(graph);
}

static void append_graph(CUstream stream, CUgraph graph) {
    for (CUgraphNode node = graph->first; node; node = node->next) {
        if (node->child) {
            append_graph(stream, node->child);
            continue;
        }
        struct op op = node->op;
        op.number = num_launches;
        described_in_graphs += op.kind == LAUNCH;
        append(stream, op);
    }
}

static CUgraphNode find_copy(CUgraph graph, CUgraphNode original) {
    CUgraphNode found = NULL;
    for (CUgraphNode node = graph->first; node && !found; node = node->next)
        found = node->original == original ? node : node->child ? find_copy(node->child, original) : NULL;
    return found;
}

static CUgraphNode node_of(CUgraphExec exec, CUgraphNode original) { return find_copy(exec->graph, original); }

static struct op copy_op(const CUDA_MEMCPY3D *it) {
    return (struct op){
        COPY, .target = (char *)it->dstDevice, .source = (char *)it->srcDevice, .size = it->WidthInBytes};
}

static CUresult set_op(CUgraphExec exec, CUgraphNode original, struct op op, long *what) {
    count(what);
    CUgraphNode node = node_of(exec, original);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    node->op = op;
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *made, unsigned flags) {
    *made = new_graph();
    return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
    free_graph(graph);
    return CUDA_SUCCESS;
}
CUresult cuGraphAddNode(
    CUgraphNode *made, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *edges, size_t num_before,
    CUgraphNodeParams *it
) {
    bool is_moved = it->type == CU_GRAPH_NODE_TYPE_GRAPH && it->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    if (it->type != CU_GRAPH_NODE_TYPE_KERNEL && !is_moved) return CUDA_ERROR_NOT_SUPPORTED;
    *made = is_moved ? add_node(graph, (struct op){.kind = NOTHING}, it->graph.graph)
                     : add_node(graph, (struct op){.kind = LAUNCH}, NULL);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *it) {
    return set_op(exec, node, (struct op){.kind = LAUNCH}, &described_kernel_updates);
}
CUresult cuGraphAddMemcpyNode(
    CUgraphNode *made, CUgraph graph, const CUgraphNode *before, size_t num_before, const CUDA_MEMCPY3D *it,
    CUcontext context
) {
    *made = add_node(graph, copy_op(it), NULL);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecMemcpyNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *it, CUcontext context
) {
    return set_op(exec, node, copy_op(it), &described_copy_updates);
}
CUresult cuGraphAddMemsetNode(
    CUgraphNode *made, CUgraph graph, const CUgraphNode *before, size_t num_before, const CUDA_MEMSET_NODE_PARAMS *it,
    CUcontext context
) {
    *made = add_node(graph, fill(it->dst, it->value, it->width, it->elementSize), NULL);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecMemsetNodeSetParams(
    CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *it, CUcontext context
) {
    return set_op(exec, node, fill(it->dst, it->value, it->width, it->elementSize), &described_fill_updates);
}
CUresult cuGraphAddChildGraphNode(
    CUgraphNode *made, CUgraph graph, const CUgraphNode *before, size_t num_before, CUgraph child
) {
    *made = add_node(graph, (struct op){.kind = NOTHING}, copy_of(child));
    return CUDA_SUCCESS;
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode original, CUgraph child) {
    count(&described_child_updates);
    CUgraphNode node = node_of(exec, original);
    if (!node) return CUDA_ERROR_INVALID_VALUE;
    free_graph(node->child);
    node->child = copy_of(child);
    return CUDA_SUCCESS;
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    switch (node->op.kind) {
    case LAUNCH: *type = CU_GRAPH_NODE_TYPE_KERNEL; break;
    case COPY: *type = CU_GRAPH_NODE_TYPE_MEMCPY; break;
    case FILL: *type = CU_GRAPH_NODE_TYPE_MEMSET; break;
    default: *type = node->child ? CU_GRAPH_NODE_TYPE_GRAPH : CU_GRAPH_NODE_TYPE_EMPTY;
    }
    return CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeSetAttribute(
    CUgraphNode node, CUkernelNodeAttrID attribute, const CUkernelNodeAttrValue *value
) {
    return CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *number) {
    size_t room = nodes ? *number : 0, found = 0;
    for (CUgraphNode node = graph->first; node; node = node->next, found++)
        if (found < room) nodes[found] = node;
    if (!nodes || found < room) *number = found;
    return CUDA_SUCCESS;
}
CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *number) {
    if (nodes && *number) nodes[0] = graph->first;
    *number = graph->first != NULL;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec *made, CUgraph graph, unsigned long long flags) {
    *made = malloc(sizeof **made);
    (*made)->graph = copy_of(graph);
    count(&described_graphs_made);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
    count(&described_graphs_dropped);
    free_graph(exec->graph);
    free(exec);
    return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    stream = stream_of(stream);
    pthread_mutex_lock(&mutex);
    num_launches++;
    described_graphs++;
    append_graph(stream, exec->graph);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuStreamBeginCaptureToGraph(
    CUstream stream, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *edges, size_t num_before,
    CUstreamCaptureMode mode
) {
    stream->capture = graph;
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    *graph = stream->capture;
    stream->capture = NULL;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = stream_of(stream)->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
