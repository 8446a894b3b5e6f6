// An engine that is built over addresses only holds what one over memory holds.
#include <gtest/gtest.h>

#include "engine/training.h"
#include "zc/comm/plan_communicator.h"

namespace zc::engine {
namespace {

TEST(PlanTest, HoldsWhatAnEngineHolds) {
  for (int num_ranks : {1, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        const Options options = options_of(stage, 2000);
        StepEngine plan(comm::make_plan_communicator(num_ranks), device::plan_device(), specs(dtype, stage),
                        {math::AdamHyper{}}, options);
        plan.allocate_states();
        test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
          const auto engine = make_engine(comm, {.num_ranks = num_ranks, .options = options, .dtype = dtype});
          EXPECT_EQ(plan.memory_report(), engine->memory_report()) << num_ranks << " ranks, stage " << stage;
          EXPECT_EQ(plan.most_while_running(), engine->most_while_running());
        });
      }
    }
  }
}

TEST(PlanTest, TakesNoMemory) {
  constexpr std::int64_t kNumel = std::int64_t{1} << 40;  // 16 TiB of states
  StepEngine plan(comm::make_plan_communicator(8), device::plan_device(), {{"p", kNumel, DType::kF32, 0}},
                  {math::AdamHyper{}}, {});
  plan.allocate_states();
  EXPECT_EQ(plan.memory_report().at("optimizer_state"), 8 * kNumel);
  EXPECT_EQ(plan.most_while_running().at("gradient_buckets"), 4 * kNumel);
}

TEST(PlanTest, RunsNothing) {
  const auto comm = comm::make_plan_communicator(2);
  EXPECT_EQ(comm->size(), 2);
  EXPECT_THROW(comm->barrier("end"), Error);
  EXPECT_THROW(comm::make_plan_communicator(0), Error);
}

}  // namespace
}  // namespace zc::engine
