/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank computes on: a GPU or the CPU, and how GPUs talk.  Decided once,
 * the same way on all ranks, before anything is planned. */
#pragma once

#include "codelets/gpu/device.h"
#include "runtime/comm/coll.h"
#include "runtime/config/config.h"
#include "runtime/machine/cores.h"
#include "runtime/plan/plan.h"

#define IZ_GPUS_MAX 64

struct iz_gpu_choice {
    int device; /* index of this rank's GPU, -1: the CPU */
    struct iz_device_info info;
    int gpus, gpu[IZ_GPUS_MAX]; /* that ranks of this host take in turn */
    int sharing;                /* ranks on this GPU, this one included */
    int ranks;                  /* in all */
    bool nccl;
    const char *why_cpu; /* run.device auto found no GPU; else "" */
};

/* All ranks.  A wish of the config that cannot be met is a negative errno with
 * the reason printed.  ranks, here: as many as were started in all and on this
 * host; or as many as a plan is for, of which this is the first. */
int iz_gpu_choose(struct iz_gpu_choice *p, const struct iz_config *c,
                  struct iz_coll *coll, int ranks, int here);
/* Of the first n ranks of this host, those that share cores with this one:
 * their GPUs are near the same ones, or units are computed on the CPU. */
int iz_gpu_near(const struct iz_gpu_choice *p, const struct iz_cores *t, int n);
/* Memory of the GPU that this rank may plan with, bytes. */
int64_t iz_gpu_memory(const struct iz_gpu_choice *p, const struct iz_config *c);
/* What the plan has to know about it. */
struct iz_target iz_gpu_target(const struct iz_gpu_choice *p,
                               const struct iz_config *c, int workers);
