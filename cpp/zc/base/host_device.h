// ZC_HOST_DEVICE marks functions that the CPU kernels and CUDA kernels share, ZC_DEVICE those that only kernels call.
// ZC_UNROLL unrolls the loop that follows, on the device: then arrays that it indexes stay in registers.
// ZC_UNROLL_BY(n) unrolls it n times: then n loads are under way at once.
#pragma once

#if defined(__CUDACC__)
#define ZC_HOST_DEVICE __host__ __device__
#define ZC_DEVICE __device__
#else
#define ZC_HOST_DEVICE
#define ZC_DEVICE
#endif

#define ZC_PRAGMA(text) _Pragma(#text)
#if defined(__CUDA_ARCH__)
#define ZC_UNROLL ZC_PRAGMA(unroll)
#define ZC_UNROLL_BY(n) ZC_PRAGMA(unroll n)
#else
#define ZC_UNROLL
#define ZC_UNROLL_BY(n)
#endif
