// Kernel speed against the memory ceiling, measured beside it.
//
// A ceiling is a loop over the same arrays that reads and writes what the kernel does and computes next to nothing.
// Both run in alternating blocks of two passes, so that whatever else the machine does hits both alike; of_ceiling is
// the median over the blocks of the ceiling's time by the kernel's. Ceilings split their arrays statically over threads
// of their own, so they say nothing about the core's. They combine by exclusive or: the second pass of a block undoes
// the first, and the kernel finds the numbers it left. Each benchmark repeats its kernel's work element by element on
// the head of the arrays and fails on a differing bit.
//
// bytes: an element's, as they cross the memory bus: reads, writes, and the read that precedes a write to memory that
// is not in the cache, unless the write goes past it. Arrays are larger than any cache.
//
//   kernels_bench --benchmark_format=json           machine-readable
//   kernels_bench --benchmark_filter=Adam
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zc/base/memory.h"
#include "zc/base/parallel.h"
#include "zc/device/kernels.h"
#include "zc/device/target_clones.h"
#include "zc/math/fold.h"
#include "zc/math/norm.h"

namespace zc::device {
namespace {

constexpr std::int64_t kNumel = 50'000'000;
constexpr std::int64_t kOptimizerNumel = 200'000'000;
constexpr std::int64_t kChecked = 10'000;  // elements
constexpr int kBlocks = 20;
constexpr int kPasses = 2;  // a block

template <class T>
constexpr DType kDType = DType::kF32;
template <>
constexpr DType kDType<F16> = DType::kF16;
template <>
constexpr DType kDType<BF16> = DType::kBF16;

template <class T>
using Word = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;

// Elements as the engine allocates them, all touched.
template <class T>
class Array {
 public:
  explicit Array(std::int64_t numel)
      : memory_(allocate_host(numel * static_cast<std::int64_t>(sizeof(T)))), numel_(numel) {}

  // Values between `low` and `high` that vary from element to element.
  Array(std::int64_t numel, float low, float high, std::uint32_t seed) : Array(numel) {
    std::uint32_t state = seed;
    for (std::int64_t i = 0; i < numel; ++i) {
      state = state * 1664525u + 1013904223u;
      data()[i] = math::from_float<T>(low + (high - low) * static_cast<float>(state >> 8) * 0x1p-24f);
    }
  }

  T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  Word<T>* words() const { return reinterpret_cast<Word<T>*>(memory_.get()); }
  BufferView view() const { return {data(), numel_, kDType<T>, {}}; }
  std::vector<T> head() const { return std::vector<T>(data(), data() + kChecked); }

 private:
  Memory memory_;
  std::int64_t numel_;
};

template <class T>
void check(benchmark::State& state, const Array<T>& got, const std::vector<T>& expected) {
  if (std::memcmp(got.data(), expected.data(), kChecked * sizeof(T)) != 0) state.SkipWithError("wrong result");
}

// Ceilings: [begin, end) of arrays.

// What is only written goes through this, past the cache where `kStreamed`.
template <bool kStreamed, class To, class Value>
ZC_ALWAYS_INLINE void write_only(To* __restrict__ out, std::int64_t begin, std::int64_t end, const Value& value) {
#if defined(__SSE2__)
  if constexpr (kStreamed) {
    constexpr std::int64_t kChunk = 1024;
    alignas(64) To chunk[kChunk];
    for (; begin < end; begin += kChunk) {
      const std::int64_t count = std::min(kChunk, end - begin);
      for (std::int64_t i = 0; i < count; ++i) chunk[i] = value(begin + i);
      const auto vectors = count * static_cast<std::int64_t>(sizeof(To)) / 16;
      for (std::int64_t i = 0; i < vectors; ++i) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + begin) + i, reinterpret_cast<const __m128i*>(chunk)[i]);
      }
    }
    _mm_sfence();
    return;
  }
#endif
  for (std::int64_t i = begin; i < end; ++i) out[i] = value(i);
}

// target_clones does not reach templates, hence macros.
#define ZC_UPDATE_CEILINGS(Grad)                                                                                       \
  [[maybe_unused]] ZC_TARGET_CLONES void update_three(const Grad* __restrict__ g, std::uint32_t* __restrict__ a,       \
                                                      std::uint32_t* __restrict__ b, std::uint32_t* __restrict__ c,    \
                                                      std::int64_t begin, std::int64_t end) {                          \
    for (std::int64_t i = begin; i < end; ++i) {                                                                       \
      a[i] ^= g[i];                                                                                                    \
      b[i] ^= g[i];                                                                                                    \
      c[i] ^= g[i];                                                                                                    \
    }                                                                                                                  \
  }                                                                                                                    \
  ZC_TARGET_CLONES void update_three_and_copy(const Grad* __restrict__ g, std::uint32_t* __restrict__ a,               \
                                              std::uint32_t* __restrict__ b, std::uint32_t* __restrict__ c,            \
                                              std::uint16_t* __restrict__ out, std::int64_t begin, std::int64_t end) { \
    write_only<true>(out, begin, end, [=](std::int64_t i) __attribute__((always_inline)) {                             \
      b[i] ^= g[i];                                                                                                    \
      c[i] ^= g[i];                                                                                                    \
      return static_cast<std::uint16_t>((a[i] ^= g[i]) >> 16);                                                         \
    });                                                                                                                \
  }                                                                                                                    \
  [[maybe_unused]] ZC_TARGET_CLONES void update_two(const Grad* __restrict__ g, std::uint32_t* __restrict__ a,         \
                                                    std::uint32_t* __restrict__ b, std::int64_t begin,                 \
                                                    std::int64_t end) {                                                \
    for (std::int64_t i = begin; i < end; ++i) {                                                                       \
      a[i] ^= g[i];                                                                                                    \
      b[i] ^= g[i];                                                                                                    \
    }                                                                                                                  \
  }
ZC_UPDATE_CEILINGS(std::uint32_t)
ZC_UPDATE_CEILINGS(std::uint16_t)
#undef ZC_UPDATE_CEILINGS

#define ZC_FOLD_CEILINGS(Acc, Source)                                                                                  \
  [[maybe_unused]] ZC_TARGET_CLONES void fold_one(Acc* __restrict__ acc, const Source* __restrict__ a,                 \
                                                  std::int64_t begin, std::int64_t end) {                              \
    for (std::int64_t i = begin; i < end; ++i) acc[i] ^= a[i];                                                         \
  }                                                                                                                    \
  ZC_TARGET_CLONES void fold_two(Acc* __restrict__ acc, const Source* __restrict__ a, const Source* __restrict__ b,    \
                                 std::int64_t begin, std::int64_t end) {                                               \
    for (std::int64_t i = begin; i < end; ++i) acc[i] ^= a[i] ^ b[i];                                                  \
  }                                                                                                                    \
  [[maybe_unused]] ZC_TARGET_CLONES void fold_four(                                                                    \
      Acc* __restrict__ acc, const Source* __restrict__ a, const Source* __restrict__ b, const Source* __restrict__ c, \
      const Source* __restrict__ d, std::int64_t begin, std::int64_t end) {                                            \
    for (std::int64_t i = begin; i < end; ++i) acc[i] ^= a[i] ^ b[i] ^ c[i] ^ d[i];                                    \
  }
ZC_FOLD_CEILINGS(std::uint32_t, std::uint32_t)
ZC_FOLD_CEILINGS(std::uint32_t, std::uint16_t)
ZC_FOLD_CEILINGS(std::uint16_t, std::uint16_t)
#undef ZC_FOLD_CEILINGS

#define ZC_COPY_CEILING(From, To)                                                                   \
  ZC_TARGET_CLONES void copy(const From* __restrict__ in, To* __restrict__ out, std::int64_t begin, \
                             std::int64_t end) {                                                    \
    for (std::int64_t i = begin; i < end; ++i) out[i] = static_cast<To>(in[i]);                     \
  }
ZC_COPY_CEILING(std::uint32_t, std::uint32_t)
ZC_COPY_CEILING(std::uint32_t, std::uint16_t)
ZC_COPY_CEILING(std::uint16_t, std::uint32_t)
#undef ZC_COPY_CEILING

ZC_TARGET_CLONES std::uint32_t read_all(const std::uint32_t* in, std::int64_t begin, std::int64_t end) {
  std::uint32_t out = 0;
  for (std::int64_t i = begin; i < end; ++i) out ^= in[i];
  return out;
}

using Range = std::function<void(std::int64_t begin, std::int64_t end)>;

// Runs `range` on parts of [0, numel), a thread each.
void split(std::int64_t numel, int threads, const Range& range) {
  const std::int64_t part = (numel / threads + 1023) / 1024 * 1024;
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back([&, t] { range(t * part, std::min(numel, (t + 1) * part)); });
  range(0, std::min(numel, part));
  for (std::thread& other : others) other.join();
}

// Measures kernel() and the ceiling in alternating blocks. The time reported is a pass of the kernel.
// Returns the passes of the kernel.
int measure(benchmark::State& state, std::int64_t numel, int bytes, const std::function<void()>& kernel,
            const Range& ceiling) {
  const int threads = static_cast<int>(state.range(0));
  set_num_threads(threads);
  if (num_threads() != threads) state.SkipWithError("fewer cores than threads");
  const auto seconds_of = [](const auto& pass) {
    const auto start = std::chrono::steady_clock::now();
    for (int k = 0; k < kPasses; ++k) pass();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kPasses;
  };
  const auto ceiling_pass = [&] { split(numel, threads, ceiling); };
  std::vector<double> ratios, ceilings, kernels;
  seconds_of(ceiling_pass);
  seconds_of(kernel);
  int passes = kPasses;
  for (auto _ : state) {
    ceilings.push_back(seconds_of(ceiling_pass));
    kernels.push_back(seconds_of(kernel));
    ratios.push_back(ceilings.back() / kernels.back());
    state.SetIterationTime(kernels.back());
    passes += kPasses;
  }
  set_num_threads(1);
  const auto median = [](std::vector<double>& values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
  };
  const auto total = static_cast<double>(numel) * bytes;
  state.counters["bytes"] = bytes;
  state.counters["GB/s"] = total / median(kernels) * 1e-9;
  state.counters["ceiling_GB/s"] = total / median(ceilings) * 1e-9;
  state.counters["ns/element"] = median(kernels) / static_cast<double>(numel) * 1e9;
  state.counters["of_ceiling"] = median(ratios);
  return passes;
}

constexpr std::uint8_t kUsed = 1;
const math::StepScalars kStep{.grad_norm = 1, .clip = 1, .factor = 0.5f, .skip = 0};

template <class Model, class Grad = float>
void Adam(benchmark::State& state) {
  constexpr bool kHasModel = !std::is_same_v<Model, float>;
  constexpr std::int64_t kN = kOptimizerNumel;
  const std::vector<Piece> whole{{0, kN, 0}};
  const math::AdamScalars scalars = math::adam_scalars({.weight_decay = 0.1}, 10);
  const Array<Grad> grad(kN, -1, 1, 1);
  const Array<float> param(kN, -1, 1, 2), exp_avg(kN, -1, 1, 3), exp_avg_sq(kN, 0, 1, 4);
  const Array<Model> model(kHasModel ? kN : kChecked);
  const std::vector<Grad> g = grad.head();
  std::vector<float> p = param.head(), m = exp_avg.head(), v = exp_avg_sq.head();
  const OptimizerBuffers buffers{.grad = grad.data(),
                                 .grad_dtype = kDType<Grad>,
                                 .param = param.data(),
                                 .state1 = exp_avg.data(),
                                 .state2 = exp_avg_sq.data(),
                                 .model = kHasModel ? model.data() : nullptr,
                                 .model_dtype = kDType<Model>};
  const int passes = measure(
      state, kN, static_cast<int>(24 + sizeof(Grad) + (kHasModel ? 2 : 0)),
      [&] { cpu_kernels().adam(whole, &scalars, &kUsed, &kStep, buffers, {}); },
      [&](std::int64_t begin, std::int64_t end) {
        if constexpr (kHasModel) {
          update_three_and_copy(grad.words(), param.words(), exp_avg.words(), exp_avg_sq.words(), model.words(), begin,
                                end);
        } else {
          update_three(grad.words(), param.words(), exp_avg.words(), exp_avg_sq.words(), begin, end);
        }
      });
  for (int step = 0; step < passes; ++step) {
    for (std::size_t i = 0; i < kChecked; ++i) {
      math::adam_element(scalars, to_float(g[i]) * kStep.factor, p[i], m[i], v[i]);
    }
  }
  check(state, param, p);
  check(state, exp_avg_sq, v);
  if (kHasModel) {
    std::vector<Model> rounded;
    for (float value : p) rounded.push_back(math::from_float<Model>(value));
    check(state, model, rounded);
  }
}

void SgdMomentum(benchmark::State& state) {
  const std::vector<Piece> whole{{0, kNumel, 0}};
  const math::SgdScalars scalars = math::sgd_scalars({.momentum = 0.9, .weight_decay = 0.1}, 10);
  const Array<float> grad(kNumel, -1, 1, 1), param(kNumel, -1, 1, 2), buffer(kNumel, -1, 1, 3);
  const std::vector<float> g = grad.head();
  std::vector<float> p = param.head(), b = buffer.head();
  const OptimizerBuffers buffers{.grad = grad.data(), .param = param.data(), .state1 = buffer.data()};
  const int passes = measure(
      state, kNumel, 20, [&] { cpu_kernels().sgd(whole, &scalars, &kUsed, &kStep, buffers, {}); },
      [&](std::int64_t begin, std::int64_t end) {
        update_two(grad.words(), param.words(), buffer.words(), begin, end);
      });
  for (int step = 0; step < passes; ++step) {
    for (std::size_t i = 0; i < kChecked; ++i) {
      math::sgd_momentum_element(scalars, g[i] * kStep.factor, p[i], b[i]);
    }
  }
  check(state, param, p);
}

void Sgd(benchmark::State& state) {
  const std::vector<Piece> whole{{0, kNumel, 0}};
  const math::SgdScalars scalars = math::sgd_scalars({.weight_decay = 0.1}, 10);
  const Array<float> grad(kNumel, -1, 1, 1), param(kNumel, -1, 1, 2);
  const std::vector<float> g = grad.head();
  std::vector<float> p = param.head();
  const OptimizerBuffers buffers{.grad = grad.data(), .param = param.data()};
  const int passes = measure(
      state, kNumel, 12, [&] { cpu_kernels().sgd(whole, &scalars, &kUsed, &kStep, buffers, {}); },
      [&](std::int64_t begin, std::int64_t end) { fold_one(param.words(), grad.words(), begin, end); });
  for (int step = 0; step < passes; ++step) {
    for (std::size_t i = 0; i < kChecked; ++i) math::sgd_element(scalars, g[i] * kStep.factor, p[i]);
  }
  check(state, param, p);
}

template <class T, class Acc, int kSources>
void Fold(benchmark::State& state) {
  std::vector<Array<T>> sources;
  std::vector<const void*> in;
  for (int k = 0; k < kSources; ++k) {
    sources.emplace_back(kNumel, -1.0f, 1.0f, static_cast<std::uint32_t>(k));
    in.push_back(sources.back().data());
  }
  const Array<Acc> acc(kNumel, -1, 1, 99);
  std::vector<Acc> expected = acc.head();
  const auto source = [&](std::size_t k) { return sources[k].words(); };
  const int passes = measure(
      state, kNumel, static_cast<int>(2 * sizeof(Acc) + kSources * sizeof(T)),
      [&] { cpu_kernels().fold(in, kDType<T>, acc.view(), {}); },
      [&](std::int64_t begin, std::int64_t end) {
        if constexpr (kSources == 1) fold_one(acc.words(), source(0), begin, end);
        if constexpr (kSources == 2) fold_two(acc.words(), source(0), source(1), begin, end);
        if constexpr (kSources == 4) {
          fold_four(acc.words(), source(0), source(1), source(2), source(3), begin, end);
        }
      });
  for (int step = 0; step < passes; ++step) {
    for (const Array<T>& array : sources) {
      for (std::size_t i = 0; i < kChecked; ++i) expected[i] = math::add_element(expected[i], array.data()[i]);
    }
  }
  check(state, acc, expected);
}

// The first of a step, which only writes the accumulator.
template <class T>
void FoldFirst(benchmark::State& state) {
  const Array<T> source(kNumel, -1, 1, 1);
  const Array<float> acc(kNumel);
  const std::vector<const void*> in{source.data()};
  measure(
      state, kNumel, 8 + sizeof(T), [&] { cpu_kernels().fold_first(in, kDType<T>, acc.view(), {}); },
      [&](std::int64_t begin, std::int64_t end) { copy(source.words(), acc.words(), begin, end); });
  std::vector<float> expected;
  for (const T& value : source.head()) expected.push_back(to_float(value));
  check(state, acc, expected);
}

template <class T>
void SquareSum(benchmark::State& state) {
  const std::vector<Piece> whole{{0, kNumel, 0}};
  const Array<T> in(kNumel, -1, 1, 1);
  std::vector<std::int64_t> nonfinite(1, 0);
  double sum = 0;
  measure(
      state, kNumel, sizeof(T),
      [&] {
        math::ExactSum exact;
        cpu_kernels().square_sum(in.view(), whole, &exact, nonfinite.data(), {});
        sum = exact.to_double();
      },
      [&](std::int64_t begin, std::int64_t end) {
        constexpr std::int64_t kPerWord = 4 / sizeof(T);
        const auto* words = reinterpret_cast<const std::uint32_t*>(in.data());
        benchmark::DoNotOptimize(read_all(words, begin / kPerWord, end / kPerWord));
      });
  math::ExactSum blocks;
  for (std::int64_t begin = 0; begin < kNumel; begin += math::kBlockNumel) {
    const std::int64_t count = std::min(math::kBlockNumel, kNumel - begin);
    float wide[math::kBlockNumel];
    std::transform(in.data() + begin, in.data() + begin + count, wide, [](T value) { return to_float(value); });
    blocks.add(math::square_sum_block(wide, count));
  }
  if (sum != blocks.to_double() || nonfinite[0] != 0) state.SkipWithError("wrong result");
}

template <class From, class To>
void Cast(benchmark::State& state) {
  const Array<From> in(kNumel, -1, 1, 1);
  const Array<To> out(kNumel);
  measure(
      state, kNumel, sizeof(From) + 2 * sizeof(To), [&] { cpu_kernels().cast(in.view(), out.view(), {}); },
      [&](std::int64_t begin, std::int64_t end) { copy(in.words(), out.words(), begin, end); });
  std::vector<To> expected;
  for (const From& value : in.head()) expected.push_back(math::cast_element<To>(value));
  check(state, out, expected);
}

// One thread and two.
#define ZC_BENCHMARK(...)   \
  BENCHMARK(__VA_ARGS__)    \
      ->ArgName("threads")  \
      ->Arg(1)              \
      ->Arg(2)              \
      ->UseManualTime()     \
      ->Iterations(kBlocks) \
      ->Unit(benchmark::kMillisecond)

ZC_BENCHMARK(Adam<float>);
ZC_BENCHMARK(Adam<BF16>);
ZC_BENCHMARK(Adam<F16>);
ZC_BENCHMARK(Adam<BF16, BF16>);
ZC_BENCHMARK(Adam<F16, F16>);
ZC_BENCHMARK(SgdMomentum);
ZC_BENCHMARK(Sgd);
ZC_BENCHMARK(Fold<float, float, 1>);
ZC_BENCHMARK(Fold<float, float, 2>);
ZC_BENCHMARK(Fold<float, float, 4>);
ZC_BENCHMARK(Fold<BF16, float, 1>);
ZC_BENCHMARK(Fold<BF16, float, 2>);
ZC_BENCHMARK(Fold<BF16, float, 4>);
ZC_BENCHMARK(Fold<F16, float, 2>);
ZC_BENCHMARK(Fold<BF16, BF16, 2>);
ZC_BENCHMARK(Fold<F16, F16, 2>);
ZC_BENCHMARK(FoldFirst<float>);
ZC_BENCHMARK(FoldFirst<BF16>);
ZC_BENCHMARK(SquareSum<float>);
ZC_BENCHMARK(SquareSum<BF16>);
ZC_BENCHMARK(SquareSum<F16>);
ZC_BENCHMARK(Cast<float, BF16>);
ZC_BENCHMARK(Cast<float, F16>);
ZC_BENCHMARK(Cast<BF16, float>);
ZC_BENCHMARK(Cast<F16, float>);

}  // namespace
}  // namespace zc::device

BENCHMARK_MAIN();
