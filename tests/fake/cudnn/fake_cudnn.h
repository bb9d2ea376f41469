/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for cuDNN on the CPU, with the real header, as a shared library of
 * its name: it keeps descriptors with what they are told, and executes a plan
 * by doing the operations of its graph one after the other.  It knows nothing
 * of attention.  This is what a test may set and see, by the symbol fake_cudnn.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { FAKE_CONFIGS = 12 }; /* more than are asked for at once */

struct fake_cudnn {
    /* What the search finds, best first. */
    int configs;
    struct {
        int64_t workspace;
        bool varies; /* from one run to the next */
        bool broken; /* cannot be compiled */
    } config[FAKE_CONFIGS];
    int version;
    bool moody;      /* each plan has a kernel of its own */
    int plans, runs; /* finished ones; executions */
    int chosen;      /* the configuration of the last one */
    void *stream;    /* of the last handle */
    int alive;       /* descriptors and handles */
};
