// A stand-in for five libraries of NVIDIA's: the driver (libcuda), the runtime (libcudart), the management
// (libnvidia-ml), collectives (libnccl), and products of matrices (libcublas), which there are none of.
//
// It describes devices and computes nothing. What the host does is real: it loads modules, takes memory, launches,
// records and waits as it would. What a device does is left out: a launched kernel writes nowhere, so whatever is read
// back is what was there before. Code is looked at no further than whether it is an ELF file for GPUs that has the
// functions that are asked for. It is no substitute for a GPU, and says nothing about a real driver's speed, nor about
// what kernels do. What JAX does not ask for is not here: it would be told that there is no such function.
//
// Device memory is memory of the host that is only taken when it is written to. A thread is all devices: it takes the
// work of every stream in its order, copies what is to be copied, calls the host's functions and marks events. So work
// is asynchronous, and a host that needs its result must wait for it; `described_lag` lets that be seen.
//
// Compiled with the device in macros: NAME, COMPUTE_CAPABILITY (major), NUM_SMS, CLOCK_KHZ, SHARED_BYTES, L2_BYTES,
// MEMORY_BYTES, BYTES_PER_SECOND. DESCRIBED_DEVICES, in the environment, is how many there are.

#pragma once

#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER_VERSION 12090

// What is counted, for tests to read.
extern long described_modules;      // images of code that were loaded
extern long described_functions;    // functions that were looked up in them
extern long described_launches;     // kernels that the host launched one by one
extern long described_graphs;       // graphs that it launched
extern long described_in_graphs;    // kernels in those
extern long described_collectives;  // of all these, collectives
extern long described_copies_in;    // from the host
extern long described_copies_out;   // to the host
extern long described_copies_within;
extern long described_waits;  // calls that return when a device has done its work: on streams, events, copies
extern long described_graphs_made;     // graphs that became executable
extern long described_graphs_dropped;  // executable graphs that were thrown away
extern long described_kernel_updates;  // nodes of executable graphs that were changed, by kind
extern long described_child_updates;
extern long described_copy_updates;
extern long described_fill_updates;

// What a stream does, one after the other.
struct op {
    enum { NOTHING, LAUNCH, COPY, FILL, CALL, RECORD, WAIT } kind;
    char *target;
    const char *source;
    char *staged;  // a copy of the source, where the host may write to it at once
    size_t size, width;
    unsigned value;
    CUhostFn function;
    void *argument;
    CUevent event;
    long turn;    // which recording of the event
    long number;  // of the launch that this is part of, if any
    bool is_collective;
    struct op *next;
};

struct CUstream_st {
    CUcontext context;
    struct op *first, **last;
    bool is_busy;
    CUgraph capture;
    CUstream next;
};

struct CUgraphNode_st {
    struct op op;
    CUgraph child;
    CUgraphNode original;  // in an executable graph, the node that it was made of
    CUgraphNode next;
};

struct CUfunc_st {
    CUmodule module;
};

#pragma GCC visibility push(hidden)

extern pthread_mutex_t mutex;  // of whatever several threads change
extern pthread_cond_t changed;
extern CUstream streams;
extern long num_launches;

void count(long *what);
CUstream stream_of(CUstream given);               // the default one has several names
void append(CUstream stream, struct op op);       // needs the mutex
CUresult enqueue(CUstream stream, struct op op);  // the same, or into the graph that the stream is captured to
void execute(struct op *op);
struct op fill(CUdeviceptr target, unsigned value, size_t size, size_t width);
CUgraphNode add_node(CUgraph graph, struct op op, CUgraph child);

int num_devices(void);
CUcontext context_of(CUdevice device);
CUdevice current_device(void);
void *run_devices(void *unused);  // what the thread does

#pragma GCC visibility pop
