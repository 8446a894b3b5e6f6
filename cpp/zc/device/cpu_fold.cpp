#include <algorithm>

#include "zc/base/error.h"
#include "zc/base/half.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"

namespace zc::device::cpu {
namespace {

// With many sources, this many elements of acc stay in the first-level cache while all sources are added.
constexpr std::int64_t kChunkNumel = 4096;

template <class... Source>
ZC_ALWAYS_INLINE void fold_loop(float* __restrict__ acc, std::int64_t numel, const Source* __restrict__... in) {
  for (std::int64_t i = 0; i < numel; ++i) {
    float sum = acc[i];
    ((sum = sum + to_float(in[i])), ...);
    acc[i] = sum;
  }
}

template <class Source>
ZC_ALWAYS_INLINE void fold_chunks(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel) {
  for (std::int64_t begin = 0; begin < numel; begin += kChunkNumel) {
    const std::int64_t count = std::min(kChunkNumel, numel - begin);
    for (std::size_t first = 0; first < num_in; first += 4) {
      const auto at = [&](std::size_t k) { return static_cast<const Source*>(in[first + k]) + begin; };
      switch (std::min<std::size_t>(4, num_in - first)) {
        case 1:
          fold_loop(acc + begin, count, at(0));
          break;
        case 2:
          fold_loop(acc + begin, count, at(0), at(1));
          break;
        case 3:
          fold_loop(acc + begin, count, at(0), at(1), at(2));
          break;
        case 4:
          fold_loop(acc + begin, count, at(0), at(1), at(2), at(3));
          break;
      }
    }
  }
}

ZC_TARGET_CLONES void fold_f32(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel) {
  fold_chunks<float>(in, num_in, acc, numel);
}
ZC_TARGET_CLONES void fold_f16(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel) {
  fold_chunks<F16>(in, num_in, acc, numel);
}
ZC_TARGET_CLONES void fold_bf16(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel) {
  fold_chunks<BF16>(in, num_in, acc, numel);
}

}  // namespace

void fold(const void* const* in, std::size_t num_in, DType dtype, float* acc, std::int64_t numel) {
  switch (dtype) {
    case DType::kF32:
      return fold_f32(in, num_in, acc, numel);
    case DType::kF16:
      return fold_f16(in, num_in, acc, numel);
    case DType::kBF16:
      return fold_bf16(in, num_in, acc, numel);
    default:
      break;
  }
  fail(ErrorKind::kInternal, "[device] no such fold: got ", name(dtype), ", expected fp32, fp16 or bf16");
}

}  // namespace zc::device::cpu
