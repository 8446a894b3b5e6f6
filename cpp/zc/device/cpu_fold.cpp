#include <algorithm>

#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"
#include "zc/math/fold.h"

namespace zc::device::cpu {
namespace {

// With many sources, this many elements of acc stay in the first-level cache while all sources are added.
constexpr std::int64_t kChunkNumel = 4096;

// kFirst: acc counts as +0, whatever it holds.
template <bool kFirst, class... Source>
ZC_ALWAYS_INLINE void fold_loop(float* __restrict__ acc, std::int64_t numel, const Source* __restrict__... in) {
  for (std::int64_t i = 0; i < numel; ++i) {
    float sum = kFirst ? 0.0f : acc[i];
    ((sum = sum + to_float(in[i])), ...);
    acc[i] = sum;
  }
}

template <bool kFirst, class Source>
ZC_ALWAYS_INLINE void fold_group(const void* const* in, std::size_t num_in, std::int64_t begin, std::int64_t count,
                                 float* acc) {
  const auto at = [&](std::size_t k) { return static_cast<const Source*>(in[k]) + begin; };
  switch (num_in) {
    case 1:
      return fold_loop<kFirst>(acc, count, at(0));
    case 2:
      return fold_loop<kFirst>(acc, count, at(0), at(1));
    case 3:
      return fold_loop<kFirst>(acc, count, at(0), at(1), at(2));
    case 4:
      return fold_loop<kFirst>(acc, count, at(0), at(1), at(2), at(3));
  }
}

template <class Source>
ZC_ALWAYS_INLINE void fold_chunks(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel,
                                  bool first) {
  for (std::int64_t begin = 0; begin < numel; begin += kChunkNumel) {
    const std::int64_t count = std::min(kChunkNumel, numel - begin);
    for (std::size_t k = 0; k < num_in; k += 4) {
      const std::size_t group = std::min<std::size_t>(4, num_in - k);
      if (first && k == 0) {
        fold_group<true, Source>(in + k, group, begin, count, acc + begin);
      } else {
        fold_group<false, Source>(in + k, group, begin, count, acc + begin);
      }
    }
  }
}

// 16-bit accumulators take one source at a time: the result is rounded after each anyway, and converting costs more
// than reading acc from the cache.
template <class Source, class Acc>
ZC_ALWAYS_INLINE void fold_rounded(const void* const* in, std::size_t num_in, Acc* acc, std::int64_t numel,
                                   bool first) {
  for (std::int64_t begin = 0; begin < numel; begin += kChunkNumel) {
    const std::int64_t count = std::min(kChunkNumel, numel - begin);
    for (std::size_t k = 0; k < num_in; ++k) {
      Acc* __restrict__ into = acc + begin;
      if (first && k == 0) std::fill_n(into, count, Acc{});
      const Source* __restrict__ source = static_cast<const Source*>(in[k]) + begin;
      for (std::int64_t i = 0; i < count; ++i) into[i] = math::add_element(into[i], source[i]);
    }
  }
}

// One instance for each pair of dtypes. (target_clones does not reach templates, hence a macro.)
#define ZC_FOLDS(suffix, Source)                                                                                 \
  ZC_TARGET_CLONES void fold_##suffix(const void* const* in, std::size_t num_in, float* acc, std::int64_t numel, \
                                      bool first) {                                                              \
    fold_chunks<Source>(in, num_in, acc, numel, first);                                                          \
  }                                                                                                              \
  ZC_TARGET_CLONES void fold_##suffix(const void* const* in, std::size_t num_in, F16* acc, std::int64_t numel,   \
                                      bool first) {                                                              \
    fold_rounded<Source>(in, num_in, acc, numel, first);                                                         \
  }                                                                                                              \
  ZC_TARGET_CLONES void fold_##suffix(const void* const* in, std::size_t num_in, BF16* acc, std::int64_t numel,  \
                                      bool first) {                                                              \
    fold_rounded<Source>(in, num_in, acc, numel, first);                                                         \
  }

ZC_FOLDS(f32, float)
ZC_FOLDS(f16, F16)
ZC_FOLDS(bf16, BF16)
#undef ZC_FOLDS

[[noreturn]] void fail_dtypes(DType dtype, DType acc_dtype) {
  fail(ErrorKind::kInternal, "[device] no such fold: got ", name(dtype), " into ", name(acc_dtype),
       ", expected fp32, fp16 or bf16 into any of them");
}

template <class Acc>
void fold_into(const void* const* in, std::size_t num_in, DType dtype, Acc* acc, DType acc_dtype, std::int64_t numel,
               bool first) {
  switch (dtype) {
    case DType::kF32:
      return fold_f32(in, num_in, acc, numel, first);
    case DType::kF16:
      return fold_f16(in, num_in, acc, numel, first);
    case DType::kBF16:
      return fold_bf16(in, num_in, acc, numel, first);
    default:
      fail_dtypes(dtype, acc_dtype);
  }
}

}  // namespace

void fold(const void* const* in, std::size_t num_in, DType dtype, void* acc, DType acc_dtype, std::int64_t numel,
          bool first) {
  switch (acc_dtype) {
    case DType::kF32:
      return fold_into(in, num_in, dtype, static_cast<float*>(acc), acc_dtype, numel, first);
    case DType::kF16:
      return fold_into(in, num_in, dtype, static_cast<F16*>(acc), acc_dtype, numel, first);
    case DType::kBF16:
      return fold_into(in, num_in, dtype, static_cast<BF16*>(acc), acc_dtype, numel, first);
    default:
      fail_dtypes(dtype, acc_dtype);
  }
}

}  // namespace zc::device::cpu
