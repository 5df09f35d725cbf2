// Streams, events, and the thread that is all devices.

#include "described.h"

long described_modules;
long described_functions;
long described_launches;
long described_graphs;
long described_in_graphs;
long described_collectives;
long described_copies_in;
long described_copies_out;
long described_copies_within;
long described_waits;

void count(long *what) { __atomic_add_fetch(what, 1, __ATOMIC_RELAXED); }

struct CUevent_st {
    long recorded, done;
    int num_ops;
    bool is_destroyed;
};

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st default_stream = {.last = &default_stream.first};
CUstream streams = &default_stream;
long num_launches;
static long num_begun, lag;

static bool can_run(CUstream stream) {
    struct op *op = stream->first;
    if (!op || stream->is_busy) return false;
    if (op->number && op->number + lag > num_launches) return false;
    return op->kind != WAIT || op->event->done >= op->turn;
}

void execute(struct op *op) {
    switch (op->kind) {
    case COPY:
        memmove(op->target, op->source, op->size);
        free(op->staged);
        break;
    case FILL:
        for (size_t i = 0; i < op->size; i++) memcpy(op->target + i * op->width, &op->value, op->width);
        break;
    case CALL:
        op->function(op->argument);
        break;
    default:
        break;
    }
}

void *run_devices(void *unused) {
    pthread_mutex_lock(&mutex);
    for (;;) {
        CUstream stream = streams;
        while (stream && !can_run(stream)) stream = stream->next;
        if (!stream) {
            pthread_cond_wait(&changed, &mutex);
            continue;
        }
        struct op *op = stream->first;
        stream->is_busy = true;
        if (op->number > num_begun) num_begun = op->number;
        pthread_mutex_unlock(&mutex);
        execute(op);
        pthread_mutex_lock(&mutex);
        CUevent event = op->event;
        if (event && op->kind == RECORD && event->done < op->turn) event->done = op->turn;
        if (event && --event->num_ops == 0 && event->is_destroyed) free(event);
        if (!(stream->first = op->next)) stream->last = &stream->first;
        stream->is_busy = false;
        free(op);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

CUstream stream_of(CUstream given) {
    bool is_default = !given || given == CU_STREAM_LEGACY || given == CU_STREAM_PER_THREAD;
    return is_default ? &default_stream : given;
}

void append(CUstream stream, struct op given) {
    struct op *op = malloc(sizeof *op);
    *op = given;
    if (op->kind == RECORD) op->turn = ++op->event->recorded;
    if (op->kind == WAIT) op->turn = op->event->recorded;
    if (op->event) op->event->num_ops++;
    if (op->is_collective) described_collectives++;
    *stream->last = op;
    stream->last = &op->next;
    pthread_cond_broadcast(&changed);
}

CUresult enqueue(CUstream stream, struct op op) {
    stream = stream_of(stream);
    pthread_mutex_lock(&mutex);
    if (stream->capture) {  // within a graph, nodes run in the order in which they were added
        if (!op.event) add_node(stream->capture, op, NULL);
    } else {
        if (op.kind == LAUNCH) {
            op.number = ++num_launches;
            described_launches++;
        }
        append(stream, op);
    }
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static CUresult wait_for(CUstream stream) {
    stream = stream_of(stream);
    pthread_mutex_lock(&mutex);
    while (stream->first) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

// From now on, the devices run a launch, of a kernel or a graph, only when the host has made so many more: if it waits
// for one before, it waits for ever. 0 lets them run all.
void described_lag(long num_later) {
    pthread_mutex_lock(&mutex);
    lag = num_later;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

// Launches that no device has begun.
long described_num_waiting(void) {
    pthread_mutex_lock(&mutex);
    long number = num_launches - num_begun;
    pthread_mutex_unlock(&mutex);
    return number;
}

CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority) {
    CUstream stream = calloc(1, sizeof *stream);
    stream->last = &stream->first;
    cuCtxGetCurrent(&stream->context);
    pthread_mutex_lock(&mutex);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&mutex);
    *made = stream;
    return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream *made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }
CUresult cuStreamDestroy(CUstream stream) {
    wait_for(stream);
    pthread_mutex_lock(&mutex);
    CUstream *each = &streams;
    while (*each != stream) each = &(*each)->next;
    *each = stream->next;
    pthread_mutex_unlock(&mutex);
    free(stream);
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = stream_of(stream)->context;
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
    count(&described_waits);
    return wait_for(stream);
}
CUresult cuStreamQuery(CUstream stream) {
    pthread_mutex_lock(&mutex);
    bool is_done = !stream_of(stream)->first;
    pthread_mutex_unlock(&mutex);
    return is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return enqueue(stream, (struct op){WAIT, .event = event});
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    return enqueue(stream, (struct op){CALL, .function = function, .argument = argument});
}

CUresult cuEventCreate(CUevent *made, unsigned flags) {
    *made = calloc(1, sizeof **made);
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    pthread_mutex_lock(&mutex);
    event->is_destroyed = true;
    if (!event->num_ops) free(event);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) { return enqueue(stream, (struct op){RECORD, .event = event}); }
CUresult cuEventQuery(CUevent event) {
    pthread_mutex_lock(&mutex);
    bool is_done = event->done >= event->recorded;
    pthread_mutex_unlock(&mutex);
    return is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuEventSynchronize(CUevent event) {
    count(&described_waits);
    pthread_mutex_lock(&mutex);
    for (long turn = event->recorded; event->done < turn;) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
