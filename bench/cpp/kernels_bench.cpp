// Kernel speed on one thread against the memory ceiling of the same run.
//
// Times are of 50 million elements: 50 ms is 1 ns an element. bytes_per_second counts what crosses the memory bus:
// reads, writes, and the read that precedes a write to memory not yet in cache (so triad moves 16 bytes an element
// where STREAM's convention says 12). Buffers are larger than any cache. Each benchmark repeats its work element by
// element on the head of the buffers and fails on a differing bit.
//
//   kernels_bench --benchmark_format=json        machine-readable
//   kernels_bench --benchmark_repetitions=5 --benchmark_enable_random_interleaving=true      on a noisy machine
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "zc/base/memory.h"
#include "zc/device/kernels.h"
#include "zc/device/target_clones.h"
#include "zc/math/fold.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

constexpr std::int64_t kNumel = 50'000'000;
constexpr std::int64_t kChecked = 10'000;  // elements

template <class T>
constexpr DType kDType = DType::kF32;
template <>
constexpr DType kDType<F16> = DType::kF16;
template <>
constexpr DType kDType<BF16> = DType::kBF16;

// kNumel elements as the engine allocates them, all touched.
template <class T>
class Array {
 public:
  Array() { std::memset(static_cast<void*>(data()), 1, kNumel * sizeof(T)); }

  // Values between `low` and `high` that vary from element to element.
  Array(float low, float high, std::uint32_t seed) {
    std::uint32_t state = seed;
    for (std::int64_t i = 0; i < kNumel; ++i) {
      state = state * 1664525u + 1013904223u;
      data()[i] = math::from_float<T>(low + (high - low) * static_cast<float>(state >> 8) * 0x1p-24f);
    }
  }

  T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  BufferView view() const { return {data(), kNumel, kDType<T>, {}}; }
  std::vector<T> head() const { return std::vector<T>(data(), data() + kChecked); }

 private:
  Memory memory_ = allocate_host(kNumel * static_cast<std::int64_t>(sizeof(T)));
};

template <class T>
void check(benchmark::State& state, const Array<T>& got, const std::vector<T>& expected) {
  if (std::memcmp(got.data(), expected.data(), kChecked * sizeof(T)) != 0) state.SkipWithError("wrong result");
}

void report(benchmark::State& state, int bytes_per_element) {
  state.SetBytesProcessed(state.iterations() * kNumel * bytes_per_element);
  state.SetItemsProcessed(state.iterations() * kNumel);
}

const std::vector<Piece> kWhole{{0, kNumel, 0}};
const math::StepScalars kStep{.grad_norm = 1, .clip = 1, .factor = 0.5f, .skip = 0};

// Ceilings.

ZC_TARGET_CLONES void triad(const float* __restrict__ b, const float* __restrict__ c, float* __restrict__ a) {
  for (std::int64_t i = 0; i < kNumel; ++i) a[i] = b[i] + 0.5f * c[i];
}

ZC_TARGET_CLONES void negate_four(float* __restrict__ a, float* __restrict__ b, float* __restrict__ c,
                                  float* __restrict__ d) {
  for (std::int64_t i = 0; i < kNumel; ++i) {
    a[i] = -a[i];
    b[i] = -b[i];
    c[i] = -c[i];
    d[i] = -d[i];
  }
}

ZC_TARGET_CLONES std::uint32_t exclusive_or(const float* in) {
  std::uint32_t out = 0;
  for (std::int64_t i = 0; i < kNumel; ++i) out ^= float_bits(in[i]);
  return out;
}

void BM_CeilingRead(benchmark::State& state) {
  const Array<float> in(-1, 1, 1);
  std::uint32_t result = 0, expected = 0;
  for (auto _ : state) benchmark::DoNotOptimize(result = exclusive_or(in.data()));
  for (std::int64_t i = 0; i < kNumel; ++i) expected ^= float_bits(in.data()[i]);
  if (result != expected) state.SkipWithError("wrong result");
  report(state, 4);
}

void BM_CeilingTriad(benchmark::State& state) {
  const Array<float> a, b(-1, 1, 1), c(-1, 1, 2);
  for (auto _ : state) {
    triad(b.data(), c.data(), a.data());
    benchmark::ClobberMemory();
  }
  std::vector<float> expected;
  for (std::int64_t i = 0; i < kChecked; ++i) expected.push_back(b.data()[i] + 0.5f * c.data()[i]);
  check(state, a, expected);
  report(state, 16);
}

// Four arrays read and written in place, as Adam does.
void BM_CeilingUpdateFour(benchmark::State& state) {
  const Array<float> a(-1, 1, 1), b(-1, 1, 2), c(-1, 1, 3), d(-1, 1, 4);
  std::vector<float> expected = d.head();
  for (auto _ : state) {
    negate_four(a.data(), b.data(), c.data(), d.data());
    benchmark::ClobberMemory();
  }
  if (state.iterations() % 2 == 1) {
    for (float& value : expected) value = -value;
  }
  check(state, d, expected);
  report(state, 32);
}

// Ours.

template <class Model, class Grad = float>
void BM_Adam(benchmark::State& state) {
  constexpr bool kHasModel = !std::is_same_v<Model, float>;
  const math::AdamScalars scalars = math::adam_scalars({.weight_decay = 0.1}, 10);
  const Array<Grad> grad(-1, 1, 1);
  const Array<float> param(-1, 1, 2), exp_avg(-1, 1, 3), exp_avg_sq(0, 1, 4);
  const Array<Model> model;
  std::vector<Grad> g = grad.head();
  std::vector<float> p = param.head(), m = exp_avg.head(), v = exp_avg_sq.head();
  const OptimizerBuffers buffers{.grad = grad.data(),
                                 .grad_dtype = kDType<Grad>,
                                 .param = param.data(),
                                 .state1 = exp_avg.data(),
                                 .state2 = exp_avg_sq.data(),
                                 .model = kHasModel ? model.data() : nullptr,
                                 .model_dtype = kDType<Model>};
  for (auto _ : state) cpu_kernels().adam(kWhole, &scalars, &kStep, buffers, {});
  for (std::int64_t step = 0; step < static_cast<std::int64_t>(state.iterations()); ++step) {
    for (std::size_t i = 0; i < kChecked; ++i) {
      math::adam_element(scalars, to_float(g[i]) * kStep.factor, p[i], m[i], v[i]);
      g[i] = {};
    }
  }
  check(state, param, p);
  check(state, exp_avg_sq, v);
  if (kHasModel) {
    std::vector<Model> rounded;
    for (float value : p) rounded.push_back(math::from_float<Model>(value));
    check(state, model, rounded);
  }
  report(state, static_cast<int>(24 + 2 * sizeof(Grad) + (kHasModel ? 4 : 0)));
}

void BM_SgdMomentum(benchmark::State& state) {
  const math::SgdScalars scalars = math::sgd_scalars({.momentum = 0.9, .weight_decay = 0.1}, 10);
  const Array<float> grad(-1, 1, 1), param(-1, 1, 2), buffer(-1, 1, 3);
  std::vector<float> g = grad.head(), p = param.head(), b = buffer.head();
  const OptimizerBuffers buffers{.grad = grad.data(), .param = param.data(), .state1 = buffer.data()};
  for (auto _ : state) cpu_kernels().sgd(kWhole, &scalars, &kStep, buffers, {});
  for (std::int64_t step = 0; step < static_cast<std::int64_t>(state.iterations()); ++step) {
    for (std::size_t i = 0; i < kChecked; ++i) {
      math::sgd_momentum_element(scalars, g[i] * kStep.factor, p[i], b[i]);
      g[i] = 0;
    }
  }
  check(state, param, p);
  report(state, 24);
}

template <class T, class Acc = float>
void BM_Fold(benchmark::State& state) {
  const auto num_sources = static_cast<std::size_t>(state.range(0));
  std::vector<Array<T>> sources;
  std::vector<const void*> in;
  for (std::size_t k = 0; k < num_sources; ++k) {
    sources.emplace_back(-1.0f, 1.0f, static_cast<std::uint32_t>(k));
    in.push_back(sources.back().data());
  }
  const Array<Acc> acc(-1, 1, 99);
  std::vector<Acc> expected = acc.head();
  for (auto _ : state) cpu_kernels().fold(in, kDType<T>, acc.view(), {});
  for (std::int64_t step = 0; step < static_cast<std::int64_t>(state.iterations()); ++step) {
    for (const Array<T>& source : sources) {
      for (std::size_t i = 0; i < kChecked; ++i) expected[i] = math::add_element(expected[i], source.data()[i]);
    }
  }
  check(state, acc, expected);
  report(state, static_cast<int>(2 * sizeof(Acc) + num_sources * sizeof(T)));
}

template <class T>
void BM_SquareSum(benchmark::State& state) {
  const Array<T> in(-1, 1, 1);
  std::vector<std::uint8_t> nonfinite(1, 0);
  double sum = 0, expected = 0;
  for (auto _ : state) {
    math::ExactSum exact;
    cpu_kernels().square_sum(in.view(), kWhole, &exact, nonfinite.data(), {});
    sum = exact.to_double();
  }
  math::ExactSum blocks;
  for (std::int64_t begin = 0; begin < kNumel; begin += math::kBlockNumel) {
    const std::int64_t count = std::min(math::kBlockNumel, kNumel - begin);
    float wide[math::kBlockNumel];
    std::transform(in.data() + begin, in.data() + begin + count, wide, [](T value) { return to_float(value); });
    blocks.add(math::square_sum_block(wide, count));
  }
  expected = blocks.to_double();
  if (sum != expected || nonfinite[0] != 0) state.SkipWithError("wrong result");
  report(state, sizeof(T));
}

template <class From, class To>
void BM_Cast(benchmark::State& state) {
  const Array<From> in(-1, 1, 1);
  const Array<To> out;
  std::vector<To> expected;
  for (auto _ : state) cpu_kernels().cast(in.view(), out.view(), {});
  for (const From& value : in.head()) expected.push_back(math::cast_element<To>(value));
  check(state, out, expected);
  report(state, sizeof(From) + 2 * sizeof(To));
}

void BM_Zero(benchmark::State& state) {
  const Array<float> out;
  for (auto _ : state) cpu_kernels().zero(out.view(), {});
  check(state, out, std::vector<float>(kChecked, 0.0f));
  report(state, 4);  // large fills bypass the cache
}

BENCHMARK(BM_CeilingRead)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_CeilingTriad)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_CeilingUpdateFour)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Adam<float>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Adam<BF16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Adam<F16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Adam<BF16, BF16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Adam<F16, F16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_SgdMomentum)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Fold<float>)->ArgName("sources")->Arg(1)->Arg(2)->Arg(4)->Arg(8)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Fold<BF16>)->ArgName("sources")->Arg(1)->Arg(2)->Arg(4)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Fold<F16>)->ArgName("sources")->Arg(2)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Fold<BF16, BF16>)->ArgName("sources")->Arg(1)->Arg(2)->Arg(4)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Fold<F16, F16>)->ArgName("sources")->Arg(1)->Arg(2)->Arg(4)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_SquareSum<float>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_SquareSum<BF16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_SquareSum<F16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Cast<float, BF16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Cast<float, F16>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Cast<BF16, float>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Cast<F16, float>)->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Zero)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace zc::device

BENCHMARK_MAIN();
