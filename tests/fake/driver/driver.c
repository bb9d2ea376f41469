/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver without a device, for libraries that compile kernels for a
 * described one: it takes every kernel, and nothing can be run.  meson.build
 * gives the calls that a library only looks for as more names of `refuse`. */

enum { SUCCESS = 0, STUB_LIBRARY = 34, VERSION = 13000 };

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);
int cuLibraryLoadData(void **library, const void *code, void *a, void **b,
                      unsigned n, void *c, void **d, unsigned m);
int cuLibraryUnload(void *library);
int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuKernelGetFunction(void **function, void *kernel);
int cuKernelSetAttribute(int name, int value, void *kernel, int device);
int cuFuncSetAttribute(void *function, int name, int value);
int refuse(void);

int refuse(void)
{
    return STUB_LIBRARY;
}

int cuInit(unsigned flags)
{
    return SUCCESS;
}

int cuDriverGetVersion(int *version)
{
    *version = VERSION;
    return SUCCESS;
}

int cuLibraryLoadData(void **library, const void *code, void *a, void **b,
                      unsigned n, void *c, void **d, unsigned m)
{
    *library = library; /* anything but NULL */
    return SUCCESS;
}

int cuLibraryUnload(void *library)
{
    return SUCCESS;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    *kernel = library;
    return SUCCESS;
}

int cuKernelGetFunction(void **function, void *kernel)
{
    *function = kernel;
    return SUCCESS;
}

int cuKernelSetAttribute(int name, int value, void *kernel, int device)
{
    return SUCCESS;
}

int cuFuncSetAttribute(void *function, int name, int value)
{
    return SUCCESS;
}
