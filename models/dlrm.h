/* SPDX-License-Identifier: Apache-2.0 */
/* The deep learning recommendation model (Naumov et al. 2019, arXiv
 * 1906.00091): tables turn categories into vectors, an MLP turns numbers into
 * one more, the products of all pairs of these go into a second MLP, and that
 * says how likely a click is.  Hidden layers have GELU where the paper has the
 * rectifier.  The last layer has an output for each answer; the cross-entropy
 * of the two is the binary one of their difference. */
#pragma once

#include "codelets/unit/layer.h"

/* Hidden layers of an MLP at most. */
#define IZ_DLRM_LAYERS 8

struct iz_dlrm_config {
    int dense;     /* numbers of a sample */
    int tables;    /* categories of a sample */
    int rows;      /* of each table; a category is taken modulo this */
    int dim;       /* of a vector */
    int unit_rows; /* the tables are cut into units of so many rows */
    int bottom_layers, bottom_width, top_layers, top_width;
};

/* Creates a model of a struct iz_dlrm_config; close it with iz_model_close.
 * Returns 0, or -EINVAL after printing the reason.
 *
 * A record is int32: the label (0 or 1), the numbers, the categories.  With 13
 * and 26 of them these are the binary files that the paper's program makes of
 * Criteo's logs.  A number x becomes log(1 + max(x, 0)); a category's bits are
 * taken as unsigned. */
int iz_dlrm_open(struct iz_model **out, const void *config);
