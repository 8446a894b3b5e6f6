#include "zc/base/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "zc/base/error.h"

namespace zc {

Memory allocate_host(std::int64_t bytes) {
  ZC_CHECK(bytes >= 0, kInternal, "[base] allocation of ", bytes, " bytes");
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const auto wanted = static_cast<std::size_t>(bytes);
  const std::size_t alignment = wanted >= kHugePage ? kHugePage : 64;
  const std::size_t size = (wanted + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, size == 0 ? alignment : size);
  ZC_CHECK(data != nullptr, kDevice, "[base] out of host memory: got no ", bytes,
           " bytes. Use more ranks, a higher ZeRO stage or a smaller model.");
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(data, size, MADV_HUGEPAGE);  // a hint: refusal changes speed only
#endif
  std::memset(data, 0, size);
  return Memory(static_cast<std::byte*>(data), [](std::byte* p) { std::free(p); });
}

}  // namespace zc
