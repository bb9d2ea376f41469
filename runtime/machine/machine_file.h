/* SPDX-License-Identifier: Apache-2.0 */
/* The description of a machine that need not be here: what one rank of a run on
 * it has, from a file of configs/machines. */
#pragma once

#include "codelets/task/task.h"
#include "runtime/plan/limits.h"
#include "runtime/plan/plan.h"

/* All figures are sustained ones: what a large product, copy or message
 * reaches. */
struct iz_machine {
    char name[64];
    /* Of one node, which its ranks share. */
    int gpus, cores;
    int64_t host_bytes, host_bytes_per_s, core_flops_per_s;
    int64_t core_bytes_per_s; /* of ops that are no products, all cores busy */
    int64_t core_fused_flops_per_s; /* of products inside a kernel of our own;
                                     * 0: core_flops_per_s */
    int64_t core_bf16_flops_per_s;  /* of products of bf16; 0: it makes none */
    int64_t core_squares_per_s;     /* elements that a sum squares while a core
                                     * has them in its cache; 0: what reading
                                     * them at core_bytes_per_s gives */
    /* Elements whose states of 16 bits, or of fp8, a core updates while memory
     * keeps up; 0: memory alone is the limit. */
    int64_t core_moments_per_s, core_fp8_moments_per_s;
    int64_t disk_bytes, disk_bytes_per_s;
    int64_t node_bytes_per_s; /* network of a node, each way */
    /* Of one GPU; up and down: between it and the host. */
    int gpu_capability;                                 /* 90 for 9.0 */
    int64_t gpu_bytes, gpu_bytes_per_s, flops_per_s[3]; /* by enum iz_dtype */
    /* Products inside attention in 16 bits: [cuDNN's][backward]. */
    int64_t gpu_attention_flops_per_s[2][2];
    int64_t gpu_sum_flops_per_s; /* of products of 16 bits summed in fp32 over
                                  * several chunks */
    int64_t gpu_squares_bytes_per_s; /* read for the norm */
    int64_t up_bytes_per_s, down_bytes_per_s;
    /* ... beside a copy the other way, and while most of the host's workers are
     * busy. */
    int64_t up_both_bytes_per_s, up_busy_bytes_per_s, down_both_bytes_per_s;
    int64_t peer_bytes_per_s; /* between GPUs of a node, each way */
    /* Latencies: between dependent tasks, of a kernel, of a copy, of a
     * message. */
    int64_t launch_ns, kernel_ns, copy_ns, message_ns;
};

/* What a run of *c has there: no GPU, where run.device is cpu.  Negative errno
 * with the reason printed on `err`. */
int iz_machine_read(struct iz_machine *m, const struct iz_config *c,
                    const char *path, FILE *err);
/* The members of such a file, with a comma after each: the name, and all rates
 * but those that are left open. */
void iz_machine_print(const struct iz_machine *m, FILE *out);

/* Ranks of one node: one per GPU, or one on a machine without; all of them on a
 * machine that has no network. */
int iz_machine_ranks(const struct iz_machine *m, int ranks);
/* Of one op on the GPU, or on one core; bf16_products: the core's products are
 * of bf16. */
struct iz_rate iz_machine_compute(const struct iz_machine *m, enum iz_dtype t,
                                  bool bf16_products, int ranks);
/* Refuses a type that the machine's GPUs do not compute in, products that its
 * cores do not make, and a GPU that it lacks, with the reason on `err` (may be
 * NULL). */
int iz_machine_target(struct iz_target *t, const struct iz_machine *m,
                      const struct iz_config *c, int ranks, FILE *err);
/* What a rank of so many has there; the config's own limits, which are for the
 * plan alone, come first. */
struct iz_limits iz_machine_limits(const struct iz_machine *m,
                                   const struct iz_config *c, int ranks);
/* Refuses a machine without a rate that a run of this plan needs. */
int iz_machine_check(const struct iz_machine *m, const struct iz_plan *p,
                     FILE *err);
/* What one worker of each place of a rank does. */
void iz_machine_rates(const struct iz_machine *m, const struct iz_plan *p,
                      struct iz_rate rate[IZ_RATES]);
