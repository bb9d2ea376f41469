/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver without a device, for libraries that compile kernels for a
 * described one: it takes every kernel, and nothing can be run.  meson.build
 * gives each call as one more name of the function here that does for it. */

enum { SUCCESS = 0, STUB_LIBRARY = 34, VERSION = 13000 };

int cuDriverGetVersion(int *version);
int refuse(void);
int accept(void);
int hand_out(void **out);

int cuDriverGetVersion(int *version)
{
    *version = VERSION;
    return SUCCESS;
}

/* What a library only looks for. */
int refuse(void)
{
    return STUB_LIBRARY;
}

int accept(void)
{
    return SUCCESS;
}

int hand_out(void **out)
{
    *out = out; /* anything but NULL */
    return SUCCESS;
}
