#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "zc/base/error.h"
#include "zc/device/cpu_loops.h"
#include "zc/device/cpu_stream.h"
#include "zc/device/target_clones.h"
#include "zc/math/cast.h"

namespace zc::device::cpu {
namespace {

// Model: void when the fp32 parameter is the model's own, else the element type of the model's copy.
template <class Model>
using ModelPointer = std::conditional_t<std::is_void_v<Model>, void*, Model*>;

// The model's copy of a piece this long is written past the cache. A shorter one may still be there when it is used.
constexpr std::int64_t kStreamedNumel = 32768;
constexpr std::int64_t kBlockNumel = 1024;

// Runs update(i), which updates element i and returns the new parameter, over a piece, and writes the model's copy.
template <class Model, class Update>
ZC_ALWAYS_INLINE void update_loop(std::int64_t numel, [[maybe_unused]] ModelPointer<Model> __restrict__ model,
                                  const Update& update) {
  if constexpr (std::is_void_v<Model>) {
    for (std::int64_t i = 0; i < numel; ++i) update(i);
  } else if (numel < kStreamedNumel || !can_stream(model)) {
    for (std::int64_t i = 0; i < numel; ++i) model[i] = math::from_float<Model>(update(i));
  } else {
    alignas(64) Model block[kBlockNumel];
    for (std::int64_t begin = 0; begin < numel; begin += kBlockNumel) {
      const std::int64_t count = std::min(kBlockNumel, numel - begin);
      for (std::int64_t i = 0; i < count; ++i) block[i] = math::from_float<Model>(update(begin + i));
      stream_bytes(block, model + begin, count * static_cast<std::int64_t>(sizeof(Model)));
    }
    end_stream();
  }
}

// Arrays are read and written once an element, by way of copies.

template <class Model>
ZC_ALWAYS_INLINE void adam_loop(const math::AdamScalars& scalars, float factor, const float* __restrict__ grad,
                                float* __restrict__ param, float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq,
                                ModelPointer<Model> __restrict__ model, std::int64_t numel) {
  const math::AdamScalars s = scalars;
  update_loop<Model>(numel, model, [=](std::int64_t i) [[gnu::always_inline]] {
    float p = param[i], m = exp_avg[i], v = exp_avg_sq[i];
    math::adam_element(s, grad[i] * factor, p, m, v);
    param[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    return p;
  });
}

template <class Model>
ZC_ALWAYS_INLINE void sgd_loop(const math::SgdScalars& scalars, float factor, const float* __restrict__ grad,
                               float* __restrict__ param, ModelPointer<Model> __restrict__ model, std::int64_t numel) {
  const math::SgdScalars s = scalars;
  update_loop<Model>(numel, model, [=](std::int64_t i) [[gnu::always_inline]] {
    float p = param[i];
    math::sgd_element(s, grad[i] * factor, p);
    param[i] = p;
    return p;
  });
}

template <class Model>
ZC_ALWAYS_INLINE void momentum_loop(const math::SgdScalars& scalars, float factor, const float* __restrict__ grad,
                                    float* __restrict__ param, float* __restrict__ momentum_buffer,
                                    ModelPointer<Model> __restrict__ model, std::int64_t numel) {
  const math::SgdScalars s = scalars;
  update_loop<Model>(numel, model, [=](std::int64_t i) [[gnu::always_inline]] {
    float p = param[i], m = momentum_buffer[i];
    math::sgd_momentum_element(s, grad[i] * factor, p, m);
    param[i] = p;
    momentum_buffer[i] = m;
    return p;
  });
}

// One instance for each model dtype. (target_clones does not reach templates, hence a macro.)
#define ZC_OPTIMIZER_LOOPS(suffix, Model)                                                                            \
  ZC_TARGET_CLONES void adam_##suffix(const math::AdamScalars& scalars, float factor, const OptimizerBuffers& at,    \
                                      std::int64_t numel) {                                                          \
    adam_loop<Model>(scalars, factor, static_cast<const float*>(at.grad), at.param, at.state1, at.state2,            \
                     static_cast<ModelPointer<Model>>(at.model), numel);                                             \
  }                                                                                                                  \
  ZC_TARGET_CLONES void sgd_##suffix(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at,      \
                                     std::int64_t numel) {                                                           \
    sgd_loop<Model>(scalars, factor, static_cast<const float*>(at.grad), at.param,                                   \
                    static_cast<ModelPointer<Model>>(at.model), numel);                                              \
  }                                                                                                                  \
  ZC_TARGET_CLONES void momentum_##suffix(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at, \
                                          std::int64_t numel) {                                                      \
    momentum_loop<Model>(scalars, factor, static_cast<const float*>(at.grad), at.param, at.state1,                   \
                         static_cast<ModelPointer<Model>>(at.model), numel);                                         \
  }

ZC_OPTIMIZER_LOOPS(in_place, void)
ZC_OPTIMIZER_LOOPS(f32, float)
ZC_OPTIMIZER_LOOPS(f16, F16)
ZC_OPTIMIZER_LOOPS(bf16, BF16)
#undef ZC_OPTIMIZER_LOOPS

[[noreturn]] void fail_model_dtype(DType dtype) {
  fail(ErrorKind::kInternal, "[device] no such model dtype: got ", name(dtype), ", expected fp32, fp16 or bf16");
}

}  // namespace

void adam(const math::AdamScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  if (at.model == nullptr) return adam_in_place(scalars, factor, at, numel);
  switch (at.model_dtype) {
    case DType::kF32:
      return adam_f32(scalars, factor, at, numel);
    case DType::kF16:
      return adam_f16(scalars, factor, at, numel);
    case DType::kBF16:
      return adam_bf16(scalars, factor, at, numel);
    default:
      fail_model_dtype(at.model_dtype);
  }
}

void sgd(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  // One optimizer may have groups with and without momentum.
  const bool momentum = at.state1 != nullptr && scalars.momentum != 0;
  if (at.model == nullptr) return (momentum ? momentum_in_place : sgd_in_place)(scalars, factor, at, numel);
  switch (at.model_dtype) {
    case DType::kF32:
      return (momentum ? momentum_f32 : sgd_f32)(scalars, factor, at, numel);
    case DType::kF16:
      return (momentum ? momentum_f16 : sgd_f16)(scalars, factor, at, numel);
    case DType::kBF16:
      return (momentum ? momentum_bf16 : sgd_bf16)(scalars, factor, at, numel);
    default:
      fail_model_dtype(at.model_dtype);
  }
}

}  // namespace zc::device::cpu
