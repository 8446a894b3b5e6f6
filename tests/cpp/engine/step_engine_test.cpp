#include "zc/engine/step_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "support/ranks.h"
#include "zc/base/half.h"

namespace zc::engine {
namespace {

using math::AdamHyper;
using math::SgdHyper;

constexpr std::int64_t kNumels[] = {5, 3000, 0, 1, 1024, 65, 2500};

struct Setting {
  int num_ranks = 1;
  Options options;
  int micro_batches = 6;
  DType dtype = DType::kF32;
  optim::Hyper hyper = AdamHyper{.lr = 0.01, .weight_decay = 0.1};
  double max_norm = 0.5;
  int steps = 3;
};

// The gradient of one micro-batch: the same numbers whichever rank computes them. Parameter 3 is unused in odd
// micro-batches.
std::vector<float> gradient(int step, int micro_batch, int param) {
  std::mt19937 random(static_cast<unsigned>(step * 1000003 + micro_batch * 1009 + param));
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(kNumels[param]));
  for (float& value : out) value = normal(random);
  return out;
}

std::vector<std::byte> in_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> out(values.size() * static_cast<std::size_t>(size_bytes(dtype)));
  device::cpu_kernels().cast(
      {const_cast<float*>(values.data()), static_cast<std::int64_t>(values.size()), DType::kF32, {}},
      {out.data(), static_cast<std::int64_t>(values.size()), dtype, {}}, {});
  return out;
}

std::vector<zero::ParamSpec> specs(DType dtype) {
  std::vector<zero::ParamSpec> out;
  for (std::int64_t numel : kNumels) out.push_back({"p" + std::to_string(out.size()), numel, dtype, 0});
  return out;
}

std::unique_ptr<StepEngine> make_engine(std::shared_ptr<comm::Communicator> comm, const Setting& s) {
  auto engine = std::make_unique<StepEngine>(comm, device::cpu_device(), specs(s.dtype),
                                             std::vector<optim::Hyper>{s.hyper}, s.options);
  for (int p = 0; p < static_cast<int>(std::size(kNumels)); ++p) {
    std::vector<float> values = gradient(-1, comm->rank() == 0 ? 0 : 99, p);  // other ranks' values must be replaced
    engine->load_param(p, {values.data(), kNumels[p], DType::kF32, {}});
  }
  engine->allocate_states();
  return engine;
}

void run_micro_step(StepEngine& engine, const Setting& s, int rank, int step, int k) {
  const int j = k * s.num_ranks + rank;
  engine.reducer().begin_micro_step(j < s.micro_batches);
  std::vector<std::vector<std::byte>> grads(std::size(kNumels));
  for (int p = static_cast<int>(std::size(kNumels)) - 1; p >= 0; --p) {
    if (p == 3 && j % 2 == 1) continue;
    grads[static_cast<std::size_t>(p)] = in_dtype(gradient(step, j, p), s.dtype);
    engine.reducer().ready(p, {grads[static_cast<std::size_t>(p)].data(), kNumels[p], s.dtype, {}});
  }
  EXPECT_TRUE(engine.reducer().end_micro_step().empty());
}

std::vector<std::byte> params_of(const StepEngine& engine, DType dtype) {
  std::vector<std::byte> out;
  for (int p = 0; p < static_cast<int>(std::size(kNumels)); ++p) {
    const auto at = engine.param_memory(p);
    const std::byte* begin = at.memory.get() + at.offset_bytes;
    out.insert(out.end(), begin, begin + kNumels[p] * size_bytes(dtype));
  }
  return out;
}

// Trains and returns the parameters' bytes, which must be equal on all ranks.
std::vector<std::byte> train(const Setting& s) {
  std::vector<std::vector<std::byte>> results(static_cast<std::size_t>(s.num_ranks));
  test::run_ranks(s.num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
    const int rank = comm->rank();
    auto engine = make_engine(comm, s);
    const int micro_steps = (s.micro_batches + s.num_ranks - 1) / s.num_ranks;
    for (int step = 0; step < s.steps; ++step) {
      for (int k = 0; k < micro_steps; ++k) run_micro_step(*engine, s, rank, step, k);
      const StepResult result = engine->step(std::vector<optim::Hyper>{s.hyper}, s.micro_batches, s.max_norm, 0);
      EXPECT_EQ(result.scalars.skip, 0u);
    }
    results[static_cast<std::size_t>(rank)] = params_of(*engine, s.dtype);
  });
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  return results[0];
}

TEST(StepEngineTest, SameBitsForEveryStageNumberOfRanksAndBucketSize) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const optim::Hyper& hyper : {optim::Hyper{AdamHyper{.lr = 0.01, .weight_decay = 0.1}},
                                      optim::Hyper{SgdHyper{.lr = 0.1, .momentum = 0.9, .nesterov = true}}}) {
      Setting setting;
      setting.dtype = dtype;
      setting.hyper = hyper;
      const auto expected = train(setting);
      for (int num_ranks : {1, 2, 3, 4}) {
        for (int stage : {0, 1, 2}) {
          for (std::int64_t bucket_numel : {1, 3000, 1 << 20}) {
            setting.num_ranks = num_ranks;
            setting.options = {stage, bucket_numel, 2};
            EXPECT_EQ(train(setting), expected)
                << name(dtype) << " ranks " << num_ranks << " stage " << stage << " bucket " << bucket_numel;
          }
        }
      }
    }
  }
}

TEST(StepEngineTest, SgdOnExactNumbersGivesTheMeanGradient) {
  for (int num_ranks : {1, 2, 3}) {
    test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
      StepEngine engine(comm, device::cpu_device(), {{"w", 2000, DType::kF32, 0}}, {SgdHyper{.lr = 0.5}},
                        {2, 1 << 20, 2});
      engine.allocate_states();
      std::vector<float> values(2000, 3.0f), grad(2000);
      engine.load_param(0, {values.data(), 2000, DType::kF32, {}});
      for (int k = 0; k < (4 + num_ranks - 1) / num_ranks; ++k) {
        const int j = k * num_ranks + comm->rank();
        std::fill(grad.begin(), grad.end(), static_cast<float>(j));  // 0 + 1 + 2 + 3 over four micro-batches: mean 1.5
        engine.reducer().begin_micro_step(j < 4);
        engine.reducer().ready(0, {grad.data(), 2000, DType::kF32, {}});
        engine.reducer().end_micro_step();
      }
      const StepResult result = engine.step(std::vector<optim::Hyper>{SgdHyper{.lr = 0.5}}, 4, 0, 0);
      EXPECT_EQ(result.scalars.grad_norm, std::sqrt(2000.0 * 36) / 4);
      const auto at = engine.param_memory(0);
      const float* param = reinterpret_cast<const float*>(at.memory.get() + at.offset_bytes);
      for (int i = 0; i < 2000; ++i) ASSERT_EQ(param[i], 3.0f - 0.5f * 1.5f);
    });
  }
}

TEST(StepEngineTest, ANonFiniteGradientOnOneRankSkipsTheStepOnAll) {
  for (int stage : {0, 2}) {
    test::run_ranks(2, [&](std::shared_ptr<comm::Communicator> comm) {
      Setting setting;
      setting.num_ranks = 2;
      setting.options = {stage, 1 << 20, 2};
      auto engine = make_engine(comm, setting);
      const auto before = params_of(*engine, DType::kF32);
      std::vector<float> grad = gradient(0, 0, 4);
      if (comm->rank() == 1) grad[1000] = std::numeric_limits<float>::infinity();
      engine->reducer().begin_micro_step(true);
      engine->reducer().ready(4, {grad.data(), kNumels[4], DType::kF32, {}});
      engine->reducer().end_micro_step();
      const StepResult result = engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 1, 0);
      EXPECT_EQ(result.scalars.skip, 1u);
      EXPECT_EQ(result.nonfinite, std::vector<int>{4});
      EXPECT_EQ(params_of(*engine, DType::kF32), before);
      for (std::int64_t steps : engine->param_steps()) EXPECT_EQ(steps, 0);
      // Nothing of it is left: a step of zero gradients over unused parameters moves nothing.
      engine->reducer().begin_micro_step(true);
      engine->reducer().end_micro_step();
      EXPECT_EQ(engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 1, 0).scalars.grad_norm, 0);
      EXPECT_EQ(params_of(*engine, DType::kF32), before);
    });
  }
}

TEST(StepEngineTest, RanksThatStepWithOtherSettingsAreToldAndNothingIsUpdated) {
  for (int differing : {0, 1, 2, 3}) {
    EXPECT_THROW(test::run_ranks(3,
                                 [&](std::shared_ptr<comm::Communicator> comm) {
                                   Setting setting;
                                   setting.num_ranks = 3;
                                   setting.options = {differing % 3, 1 << 20, 2};
                                   auto engine = make_engine(comm, setting);
                                   const auto before = params_of(*engine, DType::kF32);
                                   run_micro_step(*engine, setting, comm->rank(), 0, 0);
                                   const bool other = comm->rank() == 1;
                                   const AdamHyper hyper{.lr = differing == 0 && other ? 0.1 : 0.2};
                                   EXPECT_THROW(
                                       engine->step(std::vector<optim::Hyper>{hyper}, differing == 1 && other ? 2 : 3,
                                                    differing == 2 && other ? 0.5 : 0, differing == 3 && other),
                                       Error);
                                   EXPECT_EQ(params_of(*engine, DType::kF32), before);
                                   throw Error(ErrorKind::kInternal, "reached the end");
                                 }),
                 Error);
  }
}

// The first momentum of a parameter must not move it again in a step in which nobody used it.
TEST(StepEngineTest, UsageIsForgottenAfterAStep) {
  test::run_ranks(2, [](std::shared_ptr<comm::Communicator> comm) {
    Setting setting;
    setting.num_ranks = 2;
    setting.options = {2, 1 << 20, 2};
    auto engine = make_engine(comm, setting);
    run_micro_step(*engine, setting, comm->rank(), 0, 0);
    engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 0, 0);
    const auto before = params_of(*engine, DType::kF32);
    engine->reducer().begin_micro_step(true);
    engine->reducer().end_micro_step();
    engine->step(std::vector<optim::Hyper>{setting.hyper}, 2, 0, 0);
    EXPECT_EQ(params_of(*engine, DType::kF32), before);
    for (std::int64_t steps : engine->param_steps()) EXPECT_EQ(steps, 1);
  });
}

// What a reduction in flight reads and writes outlives the engine. (AddressSanitizer tells.)
TEST(StepEngineTest, AnEngineMayGoWhileItsReductionsAreInFlight) {
  test::run_ranks(2, [](std::shared_ptr<comm::Communicator> comm) {
    Setting setting;
    setting.num_ranks = 2;
    setting.options = {2, 1 << 20, 2};
    {
      auto engine = make_engine(comm, setting);
      run_micro_step(*engine, setting, comm->rank(), 0, 0);
      if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 waits for this one
      engine->reducer().begin_micro_step(true);
      std::vector<std::vector<float>> grads;
      for (int p = static_cast<int>(std::size(kNumels)) - 1; p >= 0; --p) {
        grads.push_back(gradient(0, 0, p));
        engine->reducer().ready(p, {grads.back().data(), kNumels[p], DType::kF32, {}});
      }
    }
    comm->barrier("the reductions are over").wait();
  });
}

TEST(StepEngineTest, MemoryFollowsTheFormulas) {
  constexpr std::int64_t kPsi = 8 * 1024 * 4;
  for (int num_ranks : {1, 2, 4}) {
    for (int stage : {0, 1, 2}) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
          StepEngine engine(comm, device::cpu_device(), {{"w", kPsi, dtype, 0}}, {AdamHyper{}}, {stage, 1 << 20, 2});
          engine.allocate_states();
          const auto report = engine.memory_report();
          const std::int64_t n = stage == 0 ? 1 : num_ranks;
          EXPECT_EQ(report.at("parameters"), kPsi * size_bytes(dtype));
          EXPECT_EQ(report.at("gradient_accumulator"), 4 * kPsi / n);
          EXPECT_EQ(report.at("optimizer_state"), 8 * kPsi / n);
          EXPECT_EQ(report.at("master_weights"), dtype == DType::kF32 ? 0 : 4 * kPsi / n);
        });
      }
    }
  }
}

TEST(StepEngineTest, TrafficIsTwicePsi) {
  constexpr std::int64_t kPsi = 8 * 1024 * 4;
  for (int stage : {1, 2}) {
    test::run_ranks(4, [&](std::shared_ptr<comm::Communicator> comm) {
      StepEngine engine(comm, device::cpu_device(), {{"w", kPsi, DType::kF32, 0}}, {AdamHyper{}}, {stage, 1 << 20, 2});
      engine.allocate_states();
      const auto before = comm->counters();
      std::vector<float> grad(kPsi, 1.0f);
      engine.reducer().begin_micro_step(true);
      engine.reducer().ready(0, {grad.data(), kPsi, DType::kF32, {}});
      engine.reducer().end_micro_step();
      engine.step(std::vector<optim::Hyper>{AdamHyper{}}, 4, 0, 0);
      const auto moved = [&](comm::Op op) {
        const auto i = static_cast<std::size_t>(op);
        return comm->counters()[i].elements - before[i].elements;
      };
      EXPECT_EQ(moved(comm::Op::kReduceScatterAdd), kPsi);
      EXPECT_EQ(moved(comm::Op::kAllGather), kPsi);
    });
  }
}

TEST(StepEngineTest, RejectsAStageItDoesNotHave) {
  test::run_ranks(1, [&](std::shared_ptr<comm::Communicator> comm) {
    EXPECT_THROW(StepEngine(comm, device::cpu_device(), specs(DType::kF32), {AdamHyper{}}, {.stage = 4}), Error);
  });
}

}  // namespace
}  // namespace zc::engine
