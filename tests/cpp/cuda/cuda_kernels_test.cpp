// Every kernel and dtype of the CUDA backend, run on the host, against the CPU's kernels: the bits are the same.
#include "zc/cuda/cuda_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/simulation.h"
#include "device/guarded.h"
#include "zc/base/error.h"
#include "zc/device/piece_table.h"
#include "zc/math/cast.h"

namespace zc::cuda {
namespace {

using device::bits;
using device::cpu_kernels;
using device::fill_random;
using device::Guarded;
using device::kDType;
using device::OptimizerBuffers;
using device::Part;
using device::Piece;
using device::Pieces;

template <class T>
struct Type {
  using type = T;
};

// Calls body(Type<T>{}) for fp32, fp16 and bf16.
template <class Body>
void for_types(const Body& body) {
  body(Type<float>{});
  body(Type<F16>{});
  body(Type<BF16>{});
}

class CudaKernels : public ::testing::TestWithParam<int> {
 protected:
  // Multiprocessors: grids from a block or two to more than there is work.
  Simulation runtime_{{.num_multiprocessors = GetParam(), .mode = Simulation::Mode::kEager}};
  std::unique_ptr<device::Kernels> kernels_ = make_cuda_kernels(runtime_, 0);

  // Both implementations.
  template <class Body>
  void with_both(const Body& body) {
    body(cpu_kernels(), 0);
    body(*kernels_, 1);
  }
};

INSTANTIATE_TEST_SUITE_P(Multiprocessors, CudaKernels, ::testing::Values(1, 3, 132));

// Random values, with subnormals of every dtype, zeros of both signs, the largest ones, infinities and NaNs.
template <class T>
void fill(Guarded<T>& out, unsigned seed, bool finite = false) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {0.0f,     -0.0f,  1e-40f,    -1e-42f,    3e-8f, -6e-6f,
                                65504.0f, -3e38f, kInfinity, -kInfinity, NAN};
  const auto numel = static_cast<std::size_t>(out.end() - out.begin());
  std::vector<float> values(numel);
  fill_random(values.data(), numel, seed);
  std::mt19937 random(seed + 1);
  for (std::size_t i = 0; i < numel; ++i) {
    if (random() % 16 == 0) values[i] = kSpecial[random() % (finite ? 8 : 11)];
    out[i] = math::from_float<T>(values[i]);
    if (finite && !std::isfinite(to_float(out[i]))) out[i] = math::from_float<T>(1.5f);
  }
}

// The same bits; but any NaN for a NaN: which one an operation on two returns is the processor's own affair.
template <class T>
void expect_same(Guarded<T>& got, Guarded<T>& expected, const std::string& what) {
  ASSERT_TRUE(got.intact() && expected.intact()) << what;
  const std::vector<T> a = got.values(), b = expected.values();
  ASSERT_EQ(a.size(), b.size()) << what;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(to_float(a[i])) && std::isnan(to_float(b[i]))) continue;
    ASSERT_EQ(bits(a[i]), bits(b[i])) << what << "[" << i << "] of " << a.size();
  }
}

template <class T>
Guarded<T> copy_of(Guarded<T>& from, std::size_t shift) {
  Guarded<T> to(static_cast<std::size_t>(from.end() - from.begin()), shift);
  std::copy(from.begin(), from.end(), to.begin());
  return to;
}

constexpr std::size_t kSizes[] = {0, 1, 7, 8, 9, 33, 1000, 4096, 10007};

TEST_P(CudaKernels, ZeroAndScale) {
  for (std::size_t numel : kSizes) {
    for (std::size_t shift : {0u, 1u, 3u}) {
      Guarded<float> in(numel, shift);
      fill(in, 1);
      Guarded<float> values[] = {copy_of(in, shift), copy_of(in, shift)};
      with_both([&](device::Kernels& kernels, int k) { kernels.scale(values[k].view(DType::kF32), 0.37f, {}); });
      expect_same(values[1], values[0], "scale");
      with_both([&](device::Kernels& kernels, int k) { kernels.zero(values[k].view(DType::kF32), {}); });
      expect_same(values[1], values[0], "zero");
    }
  }
}

TEST_P(CudaKernels, CastHasAllBitsOfNaNsToo) {
  for_types([&]<class From>(Type<From>) {
    for_types([&]<class To>(Type<To>) {
      for (std::size_t numel : kSizes) {
        for (std::size_t shift : {0u, 1u, 5u}) {
          Guarded<From> in(numel, shift);
          std::mt19937 random(static_cast<unsigned>(numel));
          for (From& value : in) {
            const auto word = static_cast<std::uint32_t>(random());
            std::memcpy(static_cast<void*>(&value), &word, sizeof value);
          }
          for (std::size_t out_shift : {shift, std::size_t{2}}) {
            Guarded<To> out[] = {Guarded<To>(numel, out_shift), Guarded<To>(numel, out_shift)};
            with_both([&](device::Kernels& kernels, int k) {
              kernels.cast(in.view(kDType<From>), out[k].view(kDType<To>), {});
            });
            ASSERT_TRUE(in.intact() && out[1].intact());
            device::expect_same_bits(out[1].values(), out[0].values(), "cast");
            if (HasFatalFailure()) return;
          }
        }
      }
    });
  });
}

TEST_P(CudaKernels, FoldOfAnyNumberOfSources) {
  for_types([&]<class Source>(Type<Source>) {
    for_types([&]<class Acc>(Type<Acc>) {
      for (std::size_t num_in : {1u, 2u, 7u, 8u, 9u, 17u}) {
        for (std::size_t numel : {1u, 9u, 1000u, 5003u}) {
          for (bool first : {false, true}) {
            const std::size_t shift = numel % 4;
            std::vector<Guarded<Source>> in;
            std::vector<const void*> sources;
            for (std::size_t n = 0; n < num_in; ++n) {
              // Aligned with acc, all of them or (num_in odd) not all.
              in.emplace_back(numel, num_in % 2 == 1 && n + 1 == num_in ? shift + 1 : shift);
              fill(in.back(), static_cast<unsigned>(n));
            }
            for (Guarded<Source>& source : in) sources.push_back(source.data());
            Guarded<Acc> start(numel, shift);
            fill(start, 99);
            Guarded<Acc> acc[] = {copy_of(start, shift), copy_of(start, shift)};
            const int before = runtime_.num_launches();
            with_both([&](device::Kernels& kernels, int k) {
              device::fold(kernels, sources, kDType<Source>, acc[k].view(kDType<Acc>), first, {});
            });
            EXPECT_EQ(runtime_.num_launches() - before, static_cast<int>((num_in + 7) / 8));
            expect_same(acc[1], acc[0], "fold");
            if (HasFatalFailure()) return;
          }
        }
      }
    });
  });
}

void set_signalling_nan(float& value) { value = bits_float(0x7f800123); }
void set_signalling_nan(F16& value) { value.bits = 0x7c12; }
void set_signalling_nan(BF16& value) { value.bits = 0x7f82; }

// Parts of a flat buffer in all dtypes, some without data, some without elements, at any alignment; with gaps.
struct RandomParts {
  std::vector<Guarded<float>> f32;
  std::vector<Guarded<F16>> f16;
  std::vector<Guarded<BF16>> bf16;
  std::vector<Part> list;
  std::int64_t numel = 0;

  explicit RandomParts(int count) {
    std::mt19937 random(7);
    constexpr std::int64_t kNumels[] = {0, 1, 13, 64, 1024, 4095, 4097, 9000};
    for (int n = 0; n < count; ++n) {
      numel += random() % 4 == 0 ? static_cast<std::int64_t>(random() % 70) : 0;
      const std::int64_t part = kNumels[random() % 8];
      const std::size_t shift = random() % 3;
      const int kind = static_cast<int>(random() % 4);
      const auto add = [&](auto& buffers, DType dtype) {
        buffers.emplace_back(static_cast<std::size_t>(part), shift);
        fill(buffers.back(), static_cast<unsigned>(n));
        if (part > 0) set_signalling_nan(buffers.back()[0]);
        list.push_back({buffers.back().data(), dtype, numel, part});
      };
      if (kind == 0) add(f32, DType::kF32);
      if (kind == 1) add(f16, DType::kF16);
      if (kind == 2) add(bf16, DType::kBF16);
      if (kind == 3) list.push_back({nullptr, DType::kF32, numel, part});
      numel += part;
    }
  }
};

TEST_P(CudaKernels, PackOfAnyNumberOfParts) {
  for (int count : {0, 1, 30, 400}) {
    const RandomParts parts(count);
    for_types([&]<class To>(Type<To>) {
      for (std::size_t shift : {0u, 3u}) {
        const auto numel = static_cast<std::size_t>(parts.numel);
        Guarded<To> out[] = {Guarded<To>(numel, shift), Guarded<To>(numel, shift)};
        const int before = runtime_.num_launches();
        with_both([&](device::Kernels& kernels, int k) { kernels.pack(parts.list, out[k].view(kDType<To>), {}); });
        if (count <= 30) {
          EXPECT_EQ(runtime_.num_launches() - before, count > 0 ? 1 : 0);
        }
        ASSERT_TRUE(out[1].intact());
        device::expect_same_bits(out[1].values(), out[0].values(), "pack");
      }
    });
  }
}

TEST_P(CudaKernels, FoldPartsRoundsThroughTheDtypeOfTravel) {
  for (int count : {1, 30, 400}) {
    const RandomParts parts(count);
    for_types([&]<class Acc>(Type<Acc>) {
      for (DType travel : {DType::kF32, DType::kF16, DType::kBF16}) {
        for (bool first : {false, true}) {
          const auto numel = static_cast<std::size_t>(parts.numel);
          Guarded<Acc> start(numel, 0);
          fill(start, 5);
          for (Acc& value : start) {
            if (to_float(value) == 0) value = Acc{};  // accumulators never hold -0
          }
          Guarded<Acc> acc[] = {copy_of(start, 0), copy_of(start, 0)};
          with_both([&](device::Kernels& kernels, int k) {
            kernels.fold_parts(parts.list, travel, acc[k].view(kDType<Acc>), first, {});
          });
          expect_same(acc[1], acc[0], "fold_parts");
        }
      }
    });
  }
}

// Pieces of several slots with gaps between them, at any alignment.
struct SomePieces {
  std::vector<Piece> list;
  std::vector<device::Chunk> chunks;
  std::size_t numel = 0;

  SomePieces() {
    constexpr std::int64_t kNumels[] = {1500, 1, 70, 2048, 5, 1024, 3077, 64};
    std::int64_t offset = 0;
    for (int n = 0; n < 8; ++n) {
      list.push_back({offset, kNumels[n], n % 5});
      offset += kNumels[n] + (n % 3 == 2 ? 3 : n % 3);
    }
    numel = static_cast<std::size_t>(offset);
    chunks = device::chunks_of(list);
  }
  operator Pieces() const {
    Pieces pieces(list);
    pieces.chunks = chunks.data();
    pieces.num_chunks = std::ssize(chunks);
    return pieces;
  }
};

constexpr int kSlots = 5;

template <class Scalars>
struct OptimizerCase {
  const char* name;
  void (device::Kernels::*kernel)(const Pieces&, const Scalars*, const std::uint8_t*, const math::StepScalars*,
                                  const OptimizerBuffers&, device::Stream);
  std::vector<Scalars> scalars;  // one a slot
};

enum class States { kNone, kOne, kTwo };

template <class Grad, class Scalars>
void expect_same_update(device::Kernels& kernels, const OptimizerCase<Scalars>& test, States states,
                        const math::StepScalars& step, DType model, bool has_model, std::size_t shift) {
  const SomePieces pieces;
  const std::uint8_t used[kSlots] = {1, 1, 0, 1, 1};
  Guarded<Grad> grad(pieces.numel, shift);
  fill(grad, 1);
  struct Buffers {
    Guarded<float> param, state1, state2, direction;
    Guarded<float> model_f32;
    Guarded<F16> model_f16;
    Guarded<BF16> model_bf16;
  };
  const auto make = [&] {
    Buffers b{Guarded<float>(pieces.numel, shift), Guarded<float>(pieces.numel, shift),
              Guarded<float>(pieces.numel, shift), Guarded<float>(pieces.numel, shift),
              Guarded<float>(pieces.numel, shift), Guarded<F16>(pieces.numel, shift),
              Guarded<BF16>(pieces.numel, shift)};
    fill(b.param, 2);
    fill(b.state1, 3);
    fill(b.state2, 4);
    fill(b.direction, 5);
    return b;
  };
  Buffers buffers[] = {make(), make()};
  device::Kernels* both[] = {&cpu_kernels(), &kernels};
  for (int k = 0; k < 2; ++k) {
    Buffers& b = buffers[k];
    OptimizerBuffers args;
    args.grad = grad.data();
    args.grad_dtype = kDType<Grad>;
    args.param = b.param.data();
    args.state1 = states == States::kNone ? nullptr : b.state1.data();
    args.state2 = states == States::kTwo ? b.state2.data() : nullptr;
    args.direction = b.direction.data();
    args.model_dtype = model;
    if (has_model) {
      args.model = model == DType::kF32   ? static_cast<void*>(b.model_f32.data())
                   : model == DType::kF16 ? static_cast<void*>(b.model_f16.data())
                                          : static_cast<void*>(b.model_bf16.data());
    }
    (both[k]->*test.kernel)(pieces, test.scalars.data(), used, &step, args, {});
  }
  ASSERT_TRUE(grad.intact());
  const std::string what = test.name;
  expect_same(buffers[1].param, buffers[0].param, what + " param");
  expect_same(buffers[1].state1, buffers[0].state1, what + " state1");
  expect_same(buffers[1].state2, buffers[0].state2, what + " state2");
  expect_same(buffers[1].direction, buffers[0].direction, what + " direction");
  expect_same(buffers[1].model_f32, buffers[0].model_f32, what + " fp32 model");
  expect_same(buffers[1].model_f16, buffers[0].model_f16, what + " fp16 model");
  expect_same(buffers[1].model_bf16, buffers[0].model_bf16, what + " bf16 model");
}

template <class Scalars>
void expect_same_updates(Simulation& runtime, device::Kernels& kernels, const OptimizerCase<Scalars>& test,
                         States states) {
  for_types([&]<class Grad>(Type<Grad>) {
    for (DType model : {DType::kF32, DType::kF16, DType::kBF16, DType::kU8}) {  // kU8: none
      for (std::uint32_t skip : {0u, 1u}) {
        math::StepScalars step;
        step.factor = 0.37f;
        step.skip = skip;
        const int before = runtime.num_launches();
        for (std::size_t shift : {0u, 1u}) {
          expect_same_update<Grad>(kernels, test, states, step, model, model != DType::kU8, shift);
          if (::testing::Test::HasFatalFailure()) return;
        }
        EXPECT_EQ(runtime.num_launches() - before, 2) << "launches of two updates";
      }
    }
  });
}

TEST_P(CudaKernels, Adam) {
  OptimizerCase<math::AdamScalars> test{"adam", &device::Kernels::adam, {}};
  for (int slot = 0; slot < kSlots; ++slot) {
    test.scalars.push_back(
        math::adam_scalars({.weight_decay = 0.1, .decoupled_weight_decay = slot % 2 == 0}, slot + 1));
  }
  expect_same_updates(runtime_, *kernels_, test, States::kTwo);
}

TEST_P(CudaKernels, SgdWithAndWithoutMomentum) {
  OptimizerCase<math::SgdScalars> test{"sgd", &device::Kernels::sgd, {}};
  for (int slot = 0; slot < kSlots; ++slot) {
    test.scalars.push_back(math::sgd_scalars(
        {.momentum = slot % 2 * 0.9, .dampening = 0.1, .weight_decay = 0.1, .nesterov = slot == 3}, slot));
  }
  expect_same_updates(runtime_, *kernels_, test, States::kOne);
  expect_same_updates(runtime_, *kernels_, test, States::kNone);
}

TEST_P(CudaKernels, Lion) {
  OptimizerCase<math::LionScalars> test{"lion", &device::Kernels::lion, {}};
  for (int slot = 0; slot < kSlots; ++slot) test.scalars.push_back(math::lion_scalars({.weight_decay = slot * 0.1}));
  expect_same_updates(runtime_, *kernels_, test, States::kOne);
}

TEST_P(CudaKernels, Adagrad) {
  OptimizerCase<math::AdagradScalars> test{"adagrad", &device::Kernels::adagrad, {}};
  for (int slot = 0; slot < kSlots; ++slot) {
    test.scalars.push_back(math::adagrad_scalars({.weight_decay = 0.1, .initial_accumulator = 0.5}, slot + 1));
  }
  expect_same_updates(runtime_, *kernels_, test, States::kOne);
}

TEST_P(CudaKernels, MuonsTwoPasses) {
  OptimizerCase<math::MuonScalars> test{"muon_momentum", &device::Kernels::muon_momentum, {}};
  for (int slot = 0; slot < kSlots; ++slot) {
    test.scalars.push_back(math::muon_scalars({.weight_decay = 0.1, .nesterov = slot % 2 == 0}, slot + 0.5));
  }
  expect_same_updates(runtime_, *kernels_, test, States::kOne);
  test.name = "muon";
  test.kernel = &device::Kernels::muon;
  expect_same_updates(runtime_, *kernels_, test, States::kOne);
}

TEST_P(CudaKernels, SquareSumIsExact) {
  const SomePieces some;
  std::vector<Piece> large;  // more blocks than a grid takes at a time
  for (int n = 0; n < 700; ++n) large.push_back({n * 1024, 1024, 0});
  const std::vector<device::Chunk> large_chunks = device::chunks_of(large);
  Pieces large_pieces(large);
  large_pieces.chunks = large_chunks.data();
  large_pieces.num_chunks = std::ssize(large_chunks);
  for_types([&]<class Source>(Type<Source>) {
    for (bool finite : {true, false}) {
      for (const Pieces& pieces : {Pieces(some), large_pieces}) {
        const std::size_t numel = pieces.list.size() == 700 ? std::size_t{700} * 1024 : some.numel;
        for (std::size_t shift : {0u, 1u}) {
          Guarded<Source> in(numel, shift);
          fill(in, 3, finite);
          if (!finite) in[numel / 2] = math::from_float<Source>(NAN);
          math::ExactSum sums[2];
          std::vector<std::int64_t> nonfinite[] = {std::vector<std::int64_t>(kSlots),
                                                   std::vector<std::int64_t>(kSlots)};
          with_both([&](device::Kernels& kernels, int k) {
            sums[k].add(-1e30);
            for (int times = 0; times < 2; ++times) {
              kernels.square_sum(in.view(kDType<Source>), pieces, &sums[k], nonfinite[k].data(), {});
            }
            sums[k].normalize();
          });
          EXPECT_EQ(sums[1].limbs(), sums[0].limbs());
          EXPECT_EQ(nonfinite[1], nonfinite[0]);
          EXPECT_EQ(nonfinite[0] == std::vector<std::int64_t>(kSlots), finite);
        }
      }
    }
  });
}

TEST_P(CudaKernels, FinishNorm) {
  for (double scale : {1.0, 1e-160, 1e150, 0.0}) {
    for (std::int64_t bad_slot : {-1, 0, 299}) {
      for (bool scaled : {false, true}) {
        math::ExactSum sum;
        for (int n = 1; n < 100; ++n) sum.add(scale * n / 7);
        sum.limbs()[40] += 3 * (std::int64_t{1} << 40);  // not normalized
        sum.limbs()[41] -= 3 * (std::int64_t{1} << 8);
        std::vector<std::int64_t> nonfinite(300);
        if (bad_slot >= 0) nonfinite[static_cast<std::size_t>(bad_slot)] = 2;
        math::StepRule rule{.divisor = 12, .max_norm = 0.7, .scaled = scaled};
        rule.loss_scale.hysteresis = 1;
        math::StepOutcome outcomes[2];
        with_both([&](device::Kernels& kernels, int k) {
          outcomes[k].scale = math::initial_loss_scale(rule.loss_scale);
          for (int step = 0; step < 3; ++step) {
            kernels.finish_norm(&sum, nonfinite.data(), 300, rule, &outcomes[k], {});
          }
        });
        EXPECT_EQ(outcomes[1].scalars.grad_norm, outcomes[0].scalars.grad_norm);
        EXPECT_EQ(outcomes[1].scalars.clip, outcomes[0].scalars.clip);
        EXPECT_EQ(bits(outcomes[1].scalars.factor), bits(outcomes[0].scalars.factor));
        EXPECT_EQ(outcomes[1].scalars.skip, bad_slot >= 0 ? 1u : 0u);
        EXPECT_EQ(outcomes[1].scale, outcomes[0].scale);
        EXPECT_EQ(outcomes[1].scale_f32, outcomes[0].scale_f32);
        EXPECT_EQ(outcomes[1].exhausted, outcomes[0].exhausted);
      }
    }
  }
}

// Around the sizes of tiles (64, 32) and of what lies in shared memory at a time (16).
TEST_P(CudaKernels, OrthogonalizeHasTheCpusBits) {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {{1, 1},   {1, 5},    {7, 1},    {5, 17},   {16, 16},
                                                          {64, 64}, {65, 130}, {130, 65}, {33, 200}, {129, 40}};
  for (const auto& [rows, columns] : shapes) {
    for (int iterations : {0, 1, 3}) {
      Guarded<float> in(static_cast<std::size_t>(rows * columns));
      fill_random(in.data(), static_cast<std::size_t>(rows * columns), 4);
      Guarded<float> matrix[] = {copy_of(in, 0), copy_of(in, 0)};
      with_both([&](device::Kernels& kernels, int k) {
        Guarded<float> workspace(static_cast<std::size_t>(device::orthogonalize_workspace(rows, columns)));
        kernels.orthogonalize(matrix[k].data(), rows, columns, iterations, workspace.data(), {});
        EXPECT_TRUE(workspace.intact());
      });
      ASSERT_TRUE(matrix[1].intact());
      device::expect_same_bits(matrix[1].values(), matrix[0].values(), "matrix");
    }
  }
}

TEST_P(CudaKernels, OrthogonalizeMakesNaNOfWhatIsNotFinite) {
  Guarded<float> matrix(12), workspace(static_cast<std::size_t>(device::orthogonalize_workspace(3, 4)));
  matrix[5] = std::numeric_limits<float>::infinity();
  kernels_->orthogonalize(matrix.data(), 3, 4, 2, workspace.data(), {});
  for (float value : matrix) EXPECT_TRUE(std::isnan(value));
}

TEST_P(CudaKernels, NothingToDoIsNoLaunch) {
  const int before = runtime_.num_launches();
  const math::StepScalars step;
  kernels_->zero({}, {});
  kernels_->cast({}, {nullptr, 0, DType::kBF16, {}}, {});
  kernels_->scale({}, 2, {});
  kernels_->adam(std::vector<Piece>{}, nullptr, nullptr, &step, {}, {});
  math::ExactSum sum;
  kernels_->square_sum({}, std::vector<Piece>{}, &sum, nullptr, {});
  kernels_->orthogonalize(nullptr, 0, 5, 3, nullptr, {});
  EXPECT_EQ(runtime_.num_launches(), before);
}

TEST_P(CudaKernels, WhatNoKernelTakesIsAnError) {
  std::int64_t words[4] = {};
  const BufferView bytes{words, 4, DType::kU8, {}}, floats{words, 4, DType::kF32, {}};
  EXPECT_THROW(kernels_->cast(bytes, floats, {}), Error);
  EXPECT_THROW(kernels_->pack({}, bytes, {}), Error);
  EXPECT_THROW(kernels_->pack(std::vector<Part>{{words, DType::kU8, 0, 4}}, floats, {}), Error);
  EXPECT_THROW(kernels_->pack(std::vector<Part>{{words, DType::kF32, 2, 3}}, floats, {}), Error);
  const void* source = words;
  EXPECT_THROW(kernels_->fold({&source, 1}, DType::kI64, floats, {}), Error);
}

}  // namespace
}  // namespace zc::cuda
