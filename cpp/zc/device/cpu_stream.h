// Writing to memory past the cache: for what is not read again before much else has been written. It would push out
// what the next loops need, and memory would be read only to be overwritten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zc/device/target_clones.h"

namespace zc::device::cpu {

// Copies bytes past the cache; `to` must be aligned to 16. Follow it by end_stream().
ZC_ALWAYS_INLINE void stream_bytes(const void* from, void* to, std::int64_t bytes) {
#if defined(__SSE2__)
  const std::int64_t vectors = bytes / 16;
  for (std::int64_t i = 0; i < vectors; ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_loadu_si128(static_cast<const __m128i*>(from) + i));
  }
  const std::int64_t done = vectors * 16;
#else
  const std::int64_t done = 0;
#endif
  std::memcpy(static_cast<std::byte*>(to) + done, static_cast<const std::byte*>(from) + done,
              static_cast<std::size_t>(bytes - done));
}

// What was streamed is visible to other threads before what follows.
ZC_ALWAYS_INLINE void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

ZC_ALWAYS_INLINE bool can_stream(const void* to) { return reinterpret_cast<std::uintptr_t>(to) % 16 == 0; }

}  // namespace zc::device::cpu
