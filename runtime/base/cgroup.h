/* SPDX-License-Identifier: Apache-2.0 */
/* What the control groups of this process leave it: limits of containers and
 * batch systems, versions 2 and 1. */
#pragma once

#include <stdint.h>

/* Memory that its groups may still take, bytes; file pages that nobody used of
 * late count as free, since the kernel drops them.  INT64_MAX: no limit. */
int64_t iz_cgroup_memory(void);
/* Cores whose time its groups may use, e.g. 0.5.  INFINITY: no limit. */
double iz_cgroup_cores(void);

/* The number behind `head` in a file of lines, or -1. */
int64_t iz_cgroup_number(const char *path, const char *head);
