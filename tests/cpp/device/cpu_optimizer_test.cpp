#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "device/guarded.h"
#include "zc/base/error.h"
#include "zc/base/parallel.h"
#include "zc/math/cast.h"

namespace zc::device {
namespace {

enum class Kind { kAdam, kSgd, kMomentum, kLion, kAdagrad };

constexpr std::uint8_t kUsed[] = {1, 1, 1, 1, 1, 1, 1, 1};

struct NoModel {};  // the fp32 parameter is the model's own

void run_kernel(const std::vector<Piece>& pieces, const std::vector<math::AdamScalars>& scalars,
                const math::StepScalars& step, const OptimizerBuffers& buffers) {
  cpu_kernels().adam(pieces, scalars.data(), kUsed, &step, buffers, {});
}
void run_kernel(const std::vector<Piece>& pieces, const std::vector<math::SgdScalars>& scalars,
                const math::StepScalars& step, const OptimizerBuffers& buffers) {
  cpu_kernels().sgd(pieces, scalars.data(), kUsed, &step, buffers, {});
}
void run_kernel(const std::vector<Piece>& pieces, const std::vector<math::LionScalars>& scalars,
                const math::StepScalars& step, const OptimizerBuffers& buffers) {
  cpu_kernels().lion(pieces, scalars.data(), kUsed, &step, buffers, {});
}
void run_kernel(const std::vector<Piece>& pieces, const std::vector<math::AdagradScalars>& scalars,
                const math::StepScalars& step, const OptimizerBuffers& buffers) {
  cpu_kernels().adagrad(pieces, scalars.data(), kUsed, &step, buffers, {});
}

// The buffers of one optimizer, and the same update made element by element with the functors of zc/math.
template <class Model>
struct Fixture {
  static constexpr bool kHasModel = !std::is_same_v<Model, NoModel>;
  using ModelElement = std::conditional_t<kHasModel, Model, float>;

  Fixture(std::size_t numel, std::size_t shift)
      : grad(numel, shift), param(numel, shift), state1(numel, shift), state2(numel, shift), model(numel, shift) {
    fill_random(grad.data(), numel, 1);
    fill_random(param.data(), numel, 2);
    fill_random(state1.data(), numel, 3);
    fill_random(state2.data(), numel, 4);
    for (float& value : state2) value = value * value;
  }

  OptimizerBuffers buffers(Kind kind) {
    OptimizerBuffers out{.grad = grad.data(), .param = param.data()};
    if (kind != Kind::kSgd) out.state1 = state1.data();
    if (kind == Kind::kAdam) out.state2 = state2.data();
    if constexpr (kHasModel) {
      out.model = model.data();
      out.model_dtype = kDType<Model>;
    }
    return out;
  }

  template <class Scalars>
  void run(Kind kind, const std::vector<Piece>& pieces, const Scalars& scalars, const math::StepScalars& step) {
    run_kernel(pieces, scalars, step, buffers(kind));
  }

  void reference_element(const math::AdamScalars& scalars, Kind, float scaled, std::size_t i) {
    math::adam_element(scalars, scaled, param[i], state1[i], state2[i]);
  }
  void reference_element(const math::SgdScalars& scalars, Kind kind, float scaled, std::size_t i) {
    if (kind == Kind::kMomentum) {
      math::sgd_momentum_element(scalars, scaled, param[i], state1[i]);
    } else {
      math::sgd_element(scalars, scaled, param[i]);
    }
  }

  void reference_element(const math::LionScalars& scalars, Kind, float scaled, std::size_t i) {
    math::lion_element(scalars, scaled, param[i], state1[i]);
  }
  void reference_element(const math::AdagradScalars& scalars, Kind, float scaled, std::size_t i) {
    math::adagrad_element(scalars, scaled, param[i], state1[i]);
  }

  template <class Scalars>
  void reference(Kind kind, const std::vector<Piece>& pieces, const Scalars& scalars, const math::StepScalars& step) {
    for (const Piece& piece : pieces) {
      const auto begin = static_cast<std::size_t>(piece.offset), end = begin + static_cast<std::size_t>(piece.numel);
      for (std::size_t i = begin; i < end; ++i) {
        reference_element(scalars[static_cast<std::size_t>(piece.slot)], kind, grad[i] * step.factor, i);
        if constexpr (kHasModel) model[i] = math::from_float<Model>(param[i]);
      }
    }
  }

  Guarded<float> grad, param, state1, state2;
  Guarded<ModelElement> model;
};

template <class Model>
void expect_equal(Fixture<Model>& got, Fixture<Model>& expected) {
  expect_same_bits(got.grad.values(), expected.grad.values(), "grad");
  expect_same_bits(got.param.values(), expected.param.values(), "param");
  expect_same_bits(got.state1.values(), expected.state1.values(), "state1");
  expect_same_bits(got.state2.values(), expected.state2.values(), "state2");
  expect_same_bits(got.model.values(), expected.model.values(), "model");
  for (auto* buffer : {&got.grad, &got.param, &got.state1, &got.state2}) EXPECT_TRUE(buffer->intact());
  EXPECT_TRUE(got.model.intact());
}

const math::StepScalars kStep{.grad_norm = 1, .clip = 1, .factor = 0.3f, .skip = 0};

std::vector<math::AdamScalars> adam_slots() {
  return {math::adam_scalars({.lr = 1e-2, .weight_decay = 0.1}, 3),
          math::adam_scalars({.lr = 1e-3, .weight_decay = 0.1, .decoupled_weight_decay = false}, 1)};
}
std::vector<math::SgdScalars> sgd_slots(double momentum) {
  return {math::sgd_scalars({.lr = 0.1, .momentum = momentum, .dampening = 0.1, .weight_decay = 0.01}, 2),
          math::sgd_scalars({.lr = 0.1, .momentum = momentum, .nesterov = momentum > 0}, 5),
          math::sgd_scalars({.lr = 0.1, .momentum = momentum, .nesterov = momentum > 0}, 1)};
}

std::vector<math::LionScalars> lion_slots() {
  return {math::lion_scalars({.lr = 0.1, .weight_decay = 0.1}), math::lion_scalars({.lr = 0.2, .beta1 = 0.5})};
}
std::vector<math::AdagradScalars> adagrad_slots() {
  return {math::adagrad_scalars({.weight_decay = 0.1}, 3), math::adagrad_scalars({.initial_accumulator = 0.5}, 1)};
}

// Whole buffers of every size, then several pieces with a gap before, between and after them.
template <class Model, class Scalars>
void check_kernel(Kind kind, const Scalars& scalars) {
  for (std::size_t numel : sizes()) {
    const std::vector<Piece> pieces{{0, static_cast<std::int64_t>(numel), static_cast<std::int32_t>(numel % 2)}};
    Fixture<Model> got(numel, numel % 2), expected(numel, numel % 2);
    got.run(kind, pieces, scalars, kStep);
    expected.reference(kind, pieces, scalars, kStep);
    expect_equal(got, expected);
  }
  const auto last = static_cast<std::int32_t>(scalars.size() - 1);
  const std::vector<Piece> pieces{{64, 64, 0}, {192, 1, last}, {256, 63, 0}, {1024, 4097, last}};
  Fixture<Model> got(6000, 0), expected(6000, 0);
  got.run(kind, pieces, scalars, kStep);
  expected.reference(kind, pieces, scalars, kStep);
  expect_equal(got, expected);
}

template <class Scalars>
void check_kernels(Kind kind, const Scalars& scalars) {
  check_kernel<NoModel>(kind, scalars);
  check_kernel<float>(kind, scalars);
  check_kernel<F16>(kind, scalars);
  check_kernel<BF16>(kind, scalars);
}

TEST(CpuAdam, MatchesTheFunctor) { check_kernels(Kind::kAdam, adam_slots()); }
TEST(CpuSgd, PlainMatchesTheFunctor) { check_kernels(Kind::kSgd, sgd_slots(0)); }
TEST(CpuSgd, MomentumMatchesTheFunctor) { check_kernels(Kind::kMomentum, sgd_slots(0.9)); }
TEST(CpuLion, MatchesTheFunctor) { check_kernels(Kind::kLion, lion_slots()); }
TEST(CpuAdagrad, MatchesTheFunctor) { check_kernels(Kind::kAdagrad, adagrad_slots()); }

// The fp32 kernels, given the converted gradients, say what is right.
template <class Grad, class Model, class Scalars>
void check_half_grad(Kind kind, const std::vector<Piece>& pieces, std::size_t numel, const Scalars& scalars,
                     const math::StepScalars& step) {
  Fixture<Model> got(numel, numel % 2), expected(numel, numel % 2);
  Guarded<Grad> grad(numel, numel % 2);
  for (std::size_t i = 0; i < numel; ++i) {
    grad[i] = math::from_float<Grad>(expected.grad[i]);
    expected.grad[i] = to_float(grad[i]);
  }
  OptimizerBuffers buffers = got.buffers(kind);
  buffers.grad = grad.data();
  buffers.grad_dtype = kDType<Grad>;
  run_kernel(pieces, scalars, step, buffers);
  expected.run(kind, pieces, scalars, step);
  for (std::size_t i = 0; i < numel; ++i) got.grad[i] = to_float(grad[i]);  // untouched
  expect_equal(got, expected);
  EXPECT_TRUE(grad.intact());
}

template <class Grad, class Model, class Scalars>
void check_half_grads(Kind kind, const Scalars& scalars) {
  const math::StepScalars skip{.grad_norm = 0, .clip = 1, .factor = 1, .skip = 1};
  const auto last = static_cast<std::int32_t>(scalars.size() - 1);
  const std::vector<Piece> pieces{{64, 64, 0}, {192, 1, last}, {256, 63, 0}, {1024, 4097, last}};
  for (const math::StepScalars& step : {kStep, skip}) {
    for (std::size_t numel : sizes()) {
      check_half_grad<Grad, Model>(kind, {{0, static_cast<std::int64_t>(numel), last}}, numel, scalars, step);
    }
    check_half_grad<Grad, Model>(kind, pieces, 6000, scalars, step);
  }
}

template <class Scalars>
void check_all_half_grads(Kind kind, const Scalars& scalars) {
  check_half_grads<F16, NoModel>(kind, scalars);
  check_half_grads<F16, float>(kind, scalars);
  check_half_grads<F16, F16>(kind, scalars);
  check_half_grads<F16, BF16>(kind, scalars);
  check_half_grads<BF16, NoModel>(kind, scalars);
  check_half_grads<BF16, float>(kind, scalars);
  check_half_grads<BF16, F16>(kind, scalars);
  check_half_grads<BF16, BF16>(kind, scalars);
}

TEST(CpuAdam, A16BitAccumulatorIsTakenAsFp32) { check_all_half_grads(Kind::kAdam, adam_slots()); }
TEST(CpuSgd, PlainA16BitAccumulatorIsTakenAsFp32) { check_all_half_grads(Kind::kSgd, sgd_slots(0)); }
TEST(CpuSgd, MomentumA16BitAccumulatorIsTakenAsFp32) { check_all_half_grads(Kind::kMomentum, sgd_slots(0.9)); }
TEST(CpuLion, A16BitAccumulatorIsTakenAsFp32) { check_all_half_grads(Kind::kLion, lion_slots()); }
TEST(CpuAdagrad, A16BitAccumulatorIsTakenAsFp32) { check_all_half_grads(Kind::kAdagrad, adagrad_slots()); }

// Muon's two passes over elements, with every dtype of gradients and of the model.
template <class Grad, class Model>
void check_muon() {
  const std::vector<math::MuonScalars> scalars{math::muon_scalars({.lr = 0.1, .weight_decay = 0.1}, 4),
                                               math::muon_scalars({.lr = 0.1, .nesterov = false}, 0.5)};
  const std::vector<Piece> pieces{{64, 64, 0}, {192, 1, 1}, {256, 63, 0}, {1024, 4097, 1}};
  Fixture<Model> got(6000, 0), expected(6000, 0);
  Guarded<Grad> grad(6000, 0);
  for (std::size_t i = 0; i < 6000; ++i) grad[i] = math::from_float<Grad>(got.grad[i]);
  OptimizerBuffers buffers = got.buffers(Kind::kMomentum);
  buffers.direction = got.state2.data();
  buffers.grad = grad.data();
  buffers.grad_dtype = kDType<Grad>;
  cpu_kernels().muon_momentum(pieces, scalars.data(), kUsed, &kStep, buffers, {});
  cpu_kernels().muon(pieces, scalars.data(), kUsed, &kStep, buffers, {});
  for (const Piece& piece : pieces) {
    const auto& s = scalars[static_cast<std::size_t>(piece.slot)];
    for (auto i = static_cast<std::size_t>(piece.offset); i < static_cast<std::size_t>(piece.offset + piece.numel);
         ++i) {
      math::muon_momentum_element(s, to_float(grad[i]) * kStep.factor, expected.state1[i], expected.state2[i]);
      math::muon_element(s, expected.state2[i], expected.param[i]);
      if constexpr (Fixture<Model>::kHasModel) expected.model[i] = math::from_float<Model>(expected.param[i]);
    }
  }
  expect_equal(got, expected);
}

TEST(CpuMuon, PassesMatchTheFunctors) {
  check_muon<float, NoModel>();
  check_muon<float, BF16>();
  check_muon<float, F16>();
  check_muon<F16, F16>();
  check_muon<BF16, float>();
}

template <class Scalars>
void check_cuts(Kind kind, const Scalars& scalars) {
  Fixture<BF16> whole(10'007, 0), cut(10'007, 0);
  whole.run(kind, {{0, 10'007, 0}}, scalars, kStep);
  cut.run(kind, {{7168, 2839, 0}, {0, 1024, 0}, {1024, 6144, 0}}, scalars, kStep);
  expect_equal(cut, whole);
}

TEST(CpuAdam, CutsDoNotMatter) { check_cuts(Kind::kAdam, adam_slots()); }
TEST(CpuSgd, CutsDoNotMatter) { check_cuts(Kind::kMomentum, sgd_slots(0.9)); }

// Long pieces write the model's copy past the cache, at any alignment and with a tail.
template <class Model>
void check_long(std::size_t shift) {
  const std::vector<Piece> pieces{{0, 40'000, 0}, {40'960, 33'333, 1}};
  Fixture<Model> got(80'000, shift), expected(80'000, shift);
  got.run(Kind::kAdam, pieces, adam_slots(), kStep);
  expected.reference(Kind::kAdam, pieces, adam_slots(), kStep);
  expect_equal(got, expected);
}

TEST(CpuAdam, LongPiecesMatchTheFunctor) {
  for (std::size_t shift : {0u, 1u}) {
    check_long<NoModel>(shift);
    check_long<float>(shift);
    check_long<F16>(shift);
    check_long<BF16>(shift);
  }
}

// Restores the number of threads.
struct Threads {
  explicit Threads(int wanted) { set_num_threads(wanted); }
  ~Threads() { set_num_threads(1); }
};

TEST(CpuOptimizer, ThreadsDoNotMatter) {
  constexpr std::int64_t kNumel = 300'000;
  const std::vector<Piece> pieces{{0, 64, 0}, {64, 1, 1}, {1024, 200'001, 1}, {202'752, 90'000, 0}, {292'864, 5000, 1}};
  Fixture<BF16> one(kNumel, 0), several(kNumel, 0);
  one.run(Kind::kAdam, pieces, adam_slots(), kStep);
  one.run(Kind::kMomentum, pieces, sgd_slots(0.9), kStep);
  const Threads threads(4);
  several.run(Kind::kAdam, pieces, adam_slots(), kStep);
  several.run(Kind::kMomentum, pieces, sgd_slots(0.9), kStep);
  expect_equal(several, one);
}

template <class Scalars>
void check_skip(Kind kind, const Scalars& scalars) {
  const math::StepScalars skip{.grad_norm = 0, .clip = 1, .factor = 1, .skip = 1};
  Fixture<F16> got(3000, 0), expected(3000, 0);
  got.grad[70] = expected.grad[70] = std::numeric_limits<float>::quiet_NaN();
  got.run(kind, {{64, 100, 0}, {1024, 1500, 0}}, scalars, skip);
  expect_equal(got, expected);
}

TEST(CpuAdam, SkipDoesNothing) { check_skip(Kind::kAdam, adam_slots()); }
TEST(CpuSgd, SkipDoesNothing) { check_skip(Kind::kMomentum, sgd_slots(0.9)); }

TEST(CpuSgd, NoMomentumLeavesTheBufferOfOtherGroupsAlone) {
  const math::SgdHyper damped{.lr = 0.5, .momentum = 0, .dampening = 0.5};  // dampening belongs to momentum
  Fixture<NoModel> got(100, 0), expected(100, 0);
  got.run(Kind::kMomentum, {{0, 100, 0}}, std::vector{math::sgd_scalars(damped, 2)}, kStep);
  expected.reference(Kind::kSgd, {{0, 100, 0}}, std::vector{math::sgd_scalars(damped, 2)}, kStep);
  expect_equal(got, expected);
}

TEST(CpuOptimizer, NoSuchModelDtype) {
  Fixture<float> fixture(1, 0);
  OptimizerBuffers buffers = fixture.buffers(Kind::kAdam);
  buffers.model_dtype = DType::kI64;
  const std::vector<Piece> pieces{{0, 1, 0}};
  const auto expect_error = [](const auto& call) {
    try {
      call();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find("no such model dtype: got int64"), std::string::npos) << error.what();
    }
  };
  expect_error([&] { cpu_kernels().adam(pieces, adam_slots().data(), kUsed, &kStep, buffers, {}); });
  expect_error([&] { cpu_kernels().sgd(pieces, sgd_slots(0).data(), kUsed, &kStep, buffers, {}); });
}

}  // namespace
}  // namespace zc::device
