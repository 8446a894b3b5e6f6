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

// An optimizer with one state: SGD with momentum, Lion, Adagrad.
template <class Model, auto kElement, class Scalars>
ZC_ALWAYS_INLINE void one_state_loop(const Scalars& scalars, float factor, const float* __restrict__ grad,
                                     float* __restrict__ param, float* __restrict__ state,
                                     ModelPointer<Model> __restrict__ model, std::int64_t numel) {
  const Scalars s = scalars;
  update_loop<Model>(numel, model, [=](std::int64_t i) [[gnu::always_inline]] {
    float p = param[i], m = state[i];
    kElement(s, grad[i] * factor, p, m);
    param[i] = p;
    state[i] = m;
    return p;
  });
}

template <class Model>
ZC_ALWAYS_INLINE void muon_loop(const math::MuonScalars& scalars, const float* __restrict__ direction,
                                float* __restrict__ param, ModelPointer<Model> __restrict__ model, std::int64_t numel) {
  const math::MuonScalars s = scalars;
  update_loop<Model>(numel, model, [=](std::int64_t i) [[gnu::always_inline]] {
    float p = param[i];
    math::muon_element(s, direction[i], p);
    param[i] = p;
    return p;
  });
}

ZC_TARGET_CLONES void momentum_pass(const math::MuonScalars& scalars, float factor, const float* __restrict__ grad,
                                    float* __restrict__ momentum, float* __restrict__ direction, std::int64_t numel) {
  const math::MuonScalars s = scalars;
  for (std::int64_t i = 0; i < numel; ++i) {
    float m = momentum[i], d;
    math::muon_momentum_element(s, grad[i] * factor, m, d);
    momentum[i] = m;
    direction[i] = d;
  }
}

// One instance for each model dtype. (target_clones does not reach templates, hence a macro.)
#define ZC_ONE_STATE_LOOP(name, element, Scalars, Model)                                                           \
  ZC_TARGET_CLONES void name(const math::Scalars& scalars, float factor, const OptimizerBuffers& at,               \
                             std::int64_t numel) {                                                                 \
    one_state_loop<Model, math::element>(scalars, factor, static_cast<const float*>(at.grad), at.param, at.state1, \
                                         static_cast<ModelPointer<Model>>(at.model), numel);                       \
  }

#define ZC_OPTIMIZER_LOOPS(suffix, Model)                                                                         \
  ZC_TARGET_CLONES void adam_##suffix(const math::AdamScalars& scalars, float factor, const OptimizerBuffers& at, \
                                      std::int64_t numel) {                                                       \
    adam_loop<Model>(scalars, factor, static_cast<const float*>(at.grad), at.param, at.state1, at.state2,         \
                     static_cast<ModelPointer<Model>>(at.model), numel);                                          \
  }                                                                                                               \
  ZC_TARGET_CLONES void sgd_##suffix(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at,   \
                                     std::int64_t numel) {                                                        \
    sgd_loop<Model>(scalars, factor, static_cast<const float*>(at.grad), at.param,                                \
                    static_cast<ModelPointer<Model>>(at.model), numel);                                           \
  }                                                                                                               \
  ZC_ONE_STATE_LOOP(momentum_##suffix, sgd_momentum_element, SgdScalars, Model)                                   \
  ZC_ONE_STATE_LOOP(lion_##suffix, lion_element, LionScalars, Model)                                              \
  ZC_ONE_STATE_LOOP(adagrad_##suffix, adagrad_element, AdagradScalars, Model)                                     \
  ZC_TARGET_CLONES void muon_##suffix(const math::MuonScalars& scalars, float, const OptimizerBuffers& at,        \
                                      std::int64_t numel) {                                                       \
    muon_loop<Model>(scalars, at.direction, at.param, static_cast<ModelPointer<Model>>(at.model), numel);         \
  }

ZC_OPTIMIZER_LOOPS(in_place, void)
ZC_OPTIMIZER_LOOPS(f32, float)
ZC_OPTIMIZER_LOOPS(f16, F16)
ZC_OPTIMIZER_LOOPS(bf16, BF16)
#undef ZC_OPTIMIZER_LOOPS
#undef ZC_ONE_STATE_LOOP

// The one of an optimizer's loops that writes the model's dtype.
template <class Loop>
Loop* pick(const OptimizerBuffers& at, Loop& in_place, Loop& f32, Loop& f16, Loop& bf16) {
  if (at.model == nullptr) return in_place;
  switch (at.model_dtype) {
    case DType::kF32:
      return f32;
    case DType::kF16:
      return f16;
    case DType::kBF16:
      return bf16;
    default:
      fail(ErrorKind::kInternal, "[device] no such model dtype: got ", name(at.model_dtype),
           ", expected fp32, fp16 or bf16");
  }
}

}  // namespace

void adam(const math::AdamScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  pick(at, adam_in_place, adam_f32, adam_f16, adam_bf16)(scalars, factor, at, numel);
}

void sgd(const math::SgdScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  // One optimizer may have groups with and without momentum.
  if (at.state1 != nullptr && scalars.momentum != 0) {
    pick(at, momentum_in_place, momentum_f32, momentum_f16, momentum_bf16)(scalars, factor, at, numel);
  } else {
    pick(at, sgd_in_place, sgd_f32, sgd_f16, sgd_bf16)(scalars, factor, at, numel);
  }
}

void lion(const math::LionScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  pick(at, lion_in_place, lion_f32, lion_f16, lion_bf16)(scalars, factor, at, numel);
}

void adagrad(const math::AdagradScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  pick(at, adagrad_in_place, adagrad_f32, adagrad_f16, adagrad_bf16)(scalars, factor, at, numel);
}

void muon_momentum(const math::MuonScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  momentum_pass(scalars, factor, static_cast<const float*>(at.grad), at.state1, at.direction, numel);
}

void muon(const math::MuonScalars& scalars, float factor, const OptimizerBuffers& at, std::int64_t numel) {
  pick(at, muon_in_place, muon_f32, muon_f16, muon_bf16)(scalars, factor, at, numel);
}

}  // namespace zc::device::cpu
