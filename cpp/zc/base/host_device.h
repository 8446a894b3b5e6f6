// ZC_HOST_DEVICE marks functions that the CPU kernels and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define ZC_HOST_DEVICE __host__ __device__
#else
#define ZC_HOST_DEVICE
#endif
