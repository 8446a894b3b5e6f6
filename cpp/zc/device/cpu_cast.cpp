#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/target_clones.h"
#include "zc/math/cast.h"

namespace zc::device::cpu {
namespace {

template <class From, class To>
ZC_ALWAYS_INLINE void cast_loop(const From* __restrict__ in, To* __restrict__ out, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) out[i] = math::cast_element<To>(in[i]);
}

// clang-format off
ZC_TARGET_CLONES void cast_each(const float* in, F16* out, std::int64_t numel) { cast_loop(in, out, numel); }
ZC_TARGET_CLONES void cast_each(const float* in, BF16* out, std::int64_t numel) { cast_loop(in, out, numel); }
ZC_TARGET_CLONES void cast_each(const F16* in, float* out, std::int64_t numel) { cast_loop(in, out, numel); }
ZC_TARGET_CLONES void cast_each(const BF16* in, float* out, std::int64_t numel) { cast_loop(in, out, numel); }
ZC_TARGET_CLONES void cast_each(const F16* in, BF16* out, std::int64_t numel) { cast_loop(in, out, numel); }
ZC_TARGET_CLONES void cast_each(const BF16* in, F16* out, std::int64_t numel) { cast_loop(in, out, numel); }
// clang-format on

}  // namespace

void cast(const void* in, DType in_dtype, void* out, DType out_dtype, std::int64_t numel) {
  const auto pair = [](DType from, DType to) { return static_cast<int>(from) * 16 + static_cast<int>(to); };
  const auto* f32 = static_cast<const float*>(in);
  const auto* f16 = static_cast<const F16*>(in);
  const auto* bf16 = static_cast<const BF16*>(in);
  switch (pair(in_dtype, out_dtype)) {
    case pair(DType::kF32, DType::kF16):
      return cast_each(f32, static_cast<F16*>(out), numel);
    case pair(DType::kF32, DType::kBF16):
      return cast_each(f32, static_cast<BF16*>(out), numel);
    case pair(DType::kF16, DType::kF32):
      return cast_each(f16, static_cast<float*>(out), numel);
    case pair(DType::kBF16, DType::kF32):
      return cast_each(bf16, static_cast<float*>(out), numel);
    case pair(DType::kF16, DType::kBF16):
      return cast_each(f16, static_cast<BF16*>(out), numel);
    case pair(DType::kBF16, DType::kF16):
      return cast_each(bf16, static_cast<F16*>(out), numel);
  }
  fail(ErrorKind::kInternal, "[device] no such cast: got ", name(in_dtype), " to ", name(out_dtype),
       ", expected two different ones of fp32, fp16 and bf16");
}

}  // namespace zc::device::cpu
