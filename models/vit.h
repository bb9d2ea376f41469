/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929): an image
 * is cut into squares, each of which is a token behind one product; blocks
 * attend to all of them; the class is read from a token of its own.  GELU has
 * the tanh form, LayerNorm adds 1e-5, and the classifier has no bias (that of
 * the last norm, times its matrix, is one). */
#pragma once

#include "codelets/unit/layer.h"

struct iz_vit_config {
    int layers, heads, width;
    int hidden; /* of the MLP; 0: 4 width */
    int image;  /* side in pixels, a multiple of `patch` */
    int patch, channels, classes;
};

/* Creates a model of a struct iz_vit_config; close it with iz_model_close.
 * Returns 0, or -EINVAL after printing the reason.
 *
 * A record is a byte with the label, then the image: channels, rows, columns,
 * a byte each.  With 32 pixels and 3 channels these are the binary files of
 * CIFAR-10. */
int iz_vit_open(struct iz_model **out, const void *config);
