/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan needs of a host and a GPU, and what these leave it. */
#pragma once

#include "runtime/plan/plan.h"

/* Memory that a rank may use, bytes. */
struct iz_limits {
    int64_t host, device;
    bool beside; /* count on the host what a process has beside its plan */
    bool tables; /* count the GPU's page tables for pinned memory */
};

/* Bytes of host memory that the plan needs (without a GPU the device tier is
 * host memory too), and of the GPU's. */
int64_t iz_plan_host_bytes(const struct iz_plan *p);
int64_t iz_plan_device_bytes(const struct iz_plan *p);
/* Bytes of host memory that a rank needs; with l->beside, beside its plan too.
 */
int64_t iz_plan_host_need(const struct iz_plan *p, const struct iz_limits *l);
/* Bytes of GPU memory that the plan needs; with l->tables, the page tables of
 * its pinned memory too. */
int64_t iz_plan_device_need(const struct iz_plan *p, const struct iz_limits *l);
bool iz_plan_within(const struct iz_plan *p, const struct iz_limits *l);

/* Bytes of a GPU of total_bytes that a plan leaves to the libraries: context,
 * handles, and NCCL's buffers between nccl_ranks ranks (0: no NCCL). */
int64_t iz_plan_reserve(int64_t total_bytes, int nccl_ranks);

/* Bytes of a host of total_bytes that no plan uses: its system and its other
 * programs have them. */
int64_t iz_plan_host_reserve(int64_t total_bytes, bool gpu);
/* Bytes that a rank's process has beside its plan; see l->beside. */
int64_t iz_plan_beside(const struct iz_plan *p);
