// ZC_TARGET_CLONES compiles a free function once for each x86-64 level; the loader picks the best one that the
// processor runs. Clones do the same IEEE operations, so results do not depend on which was picked.
//
// Empty where the loader cannot choose (no ELF ifunc), for compilers that do not know these levels in clones, and under
// ThreadSanitizer, which crashes on ifunc resolvers. Only for free functions: member functions may be virtual.
#pragma once

#include <cstdlib>  // defines __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 12
#define ZC_TARGET_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define ZC_TARGET_CLONES
#endif

// For the loop bodies that clones share: each clone must have its own copy, compiled for its level.
#define ZC_ALWAYS_INLINE [[gnu::always_inline]] inline
