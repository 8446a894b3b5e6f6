// Reading and writing one parameter's state, in every stage.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "engine/training.h"
#include "zc/base/half.h"

namespace zc::engine {
namespace {

constexpr StateKind kKinds[] = {StateKind::kMaster, StateKind::kState1, StateKind::kState2, StateKind::kGrad};

// All of a kind of state of a parameter. Collective.
std::vector<float> read(StepEngine& engine, int param, StateKind kind) {
  std::vector<float> out(static_cast<std::size_t>(kNumels[param]), -7.0f);
  engine.read_state(param, kind, {out.data(), kNumels[param], DType::kF32, {}});
  return out;
}

// Of all parameters and kinds.
std::vector<std::vector<float>> read_all(StepEngine& engine) {
  std::vector<std::vector<float>> out;
  for (StateKind kind : kKinds) {
    for (int p = 0; p < kNumParams; ++p) out.push_back(read(engine, p, kind));
  }
  return out;
}

// One step and the gradients of half another.
void run_one_step_and_a_half(StepEngine& engine, const Setting& s, int rank) {
  const int micro_steps = (s.micro_batches + s.num_ranks - 1) / s.num_ranks;
  for (int step : {0, 1}) {
    for (int k = 0; k < micro_steps; ++k) run_micro_step(engine, s, rank, step, k);
    if (step == 0) engine.step(std::vector<optim::Hyper>{s.hyper}, s.micro_batches, s.max_norm, 0);
  }
}

// Runs the body on every rank of every stage and number of ranks, with an engine in the middle of a step.
void with_engines(const std::function<void(StepEngine&, const Setting&, int rank)>& body) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int num_ranks : {1, 2, 3, 4}) {
      for (int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << name(dtype) << " ranks " << num_ranks << " stage " << stage);
        test::run_ranks(num_ranks, [&](std::shared_ptr<comm::Communicator> comm) {
          Setting setting;
          setting.num_ranks = num_ranks;
          setting.dtype = dtype;
          setting.options = options_of(stage, 3000);
          auto engine = make_engine(comm, setting);
          run_one_step_and_a_half(*engine, setting, comm->rank());
          body(*engine, setting, comm->rank());
        });
      }
    }
  }
}

TEST(StateTest, StateReadsTheSameInEveryStageOnAnyNumberOfRanks) {
  std::map<DType, std::vector<std::vector<float>>> expected;
  std::mutex mutex;
  with_engines([&](StepEngine& engine, const Setting& s, int) {
    const auto got = read_all(engine);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(got, expected.try_emplace(s.dtype, got).first->second);
  });
  // And it is the state meant.
  const auto& all = expected[DType::kBF16];
  const auto of = [&](StateKind kind, int param) {
    return all[static_cast<std::size_t>(kind) * kNumParams + static_cast<std::size_t>(param)];
  };
  std::vector<float> grad(static_cast<std::size_t>(kNumels[1]));
  for (int j = 0; j < Setting{}.micro_batches; ++j) {
    const auto rounded = in_dtype(gradient(1, j, 1), DType::kBF16);
    for (std::size_t i = 0; i < grad.size(); ++i) {
      BF16 value;
      std::memcpy(&value, rounded.data() + 2 * i, 2);
      grad[i] += to_float(value);
    }
  }
  EXPECT_EQ(of(StateKind::kGrad, 1), grad);
  EXPECT_NE(of(StateKind::kState1, 1), of(StateKind::kState2, 1));
  for (float v : of(StateKind::kState2, 1)) ASSERT_GE(v, 0.0f);
}

TEST(StateTest, AfterAStepGradientsAreZeroAlsoBesideOneThatIsWritten) {
  with_engines([&](StepEngine& engine, const Setting& s, int) {
    const auto expect = [&](float first, float others) {
      for (int p = 0; p < kNumParams; ++p) {
        const std::vector<float> want(static_cast<std::size_t>(kNumels[p]), p == 1 ? first : others);
        EXPECT_EQ(read(engine, p, StateKind::kGrad), want) << p;
      }
    };
    engine.step(std::vector<optim::Hyper>{s.hyper}, s.micro_batches, s.max_norm, 0);
    expect(0, 0);
    engine.zero_grad();
    std::vector<float> written(static_cast<std::size_t>(kNumels[1]), 2.0f);
    engine.write_state(1, StateKind::kGrad, {written.data(), kNumels[1], DType::kF32, {}});
    expect(2, 0);
    const std::vector<float> before = read(engine, 1, StateKind::kMaster), other = read(engine, 2, StateKind::kMaster);
    engine.step(std::vector<optim::Hyper>{s.hyper}, 1, s.max_norm, 0);
    EXPECT_NE(read(engine, 1, StateKind::kMaster), before);  // it counts, though no micro-batch has used the parameter
    EXPECT_EQ(read(engine, 2, StateKind::kMaster), other);
  });
}

TEST(StateTest, OwnedPartsMakeUpTheState) {
  with_engines([&](StepEngine& engine, const Setting& s, int) {
    for (StateKind kind : kKinds) {
      for (int p = 0; p < kNumParams; ++p) {
        const auto whole = read(engine, p, kind);
        const auto range = engine.owned_range(p, kind);
        std::vector<float> part(static_cast<std::size_t>(range.end - range.begin), -7.0f);
        engine.read_owned_state(p, kind, {part.data(), range.end - range.begin, DType::kF32, {}});
        EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + range.begin));
        // Every element is somebody's; in stage 0 everybody's, but for gradients.
        std::int64_t owned = range.end - range.begin;
        engine.gather_comm()->all_reduce({&owned, 1}, comm::ReduceOp::kSum, "owned").wait();
        const int owners = s.options.stage == 0 && kind != StateKind::kGrad ? s.num_ranks : 1;
        EXPECT_EQ(owned, owners * kNumels[p]);
      }
    }
  });
}

// Values that a test writes; positive, since they may be squares.
std::vector<float> written(int param, StateKind kind) {
  auto out = gradient(77, static_cast<int>(kind), param);
  for (float& v : out) v = std::abs(v);
  return out;
}

void write_whole(StepEngine& engine, int rank, int param, StateKind kind) {
  auto values = written(param, kind);
  if (rank != 0) std::fill(values.begin(), values.end(), 5.0f);  // rank 0's count
  engine.write_state(param, kind, {values.data(), kNumels[param], DType::kF32, {}});
}

void write_owned(StepEngine& engine, int, int param, StateKind kind) {
  auto values = written(param, kind);
  const auto range = engine.owned_range(param, kind);
  engine.write_owned_state(param, kind, {values.data() + range.begin, range.end - range.begin, DType::kF32, {}});
}

// Everything written reads back, and the step that follows has the same bits everywhere.
TEST(StateTest, WrittenStateIsWhatTheNextStepStartsFrom) {
  for (const auto& write : {write_whole, write_owned}) {
    std::map<DType, std::vector<std::byte>> expected;
    std::mutex mutex;
    with_engines([&](StepEngine& engine, const Setting& s, int rank) {
      for (StateKind kind : kKinds) {
        for (int p = 0; p < kNumParams; ++p) write(engine, rank, p, kind);
      }
      std::vector<std::byte> params;
      for (int p = 0; p < kNumParams; ++p) {
        const auto rounded = in_dtype(written(p, StateKind::kMaster), s.dtype);
        params.insert(params.end(), rounded.begin(), rounded.end());
        for (StateKind kind : kKinds) EXPECT_EQ(read(engine, p, kind), written(p, kind)) << static_cast<int>(kind);
      }
      EXPECT_EQ(params_of(engine, s.dtype), params);
      engine.step(std::vector<optim::Hyper>{s.hyper}, s.micro_batches, s.max_norm, 0);
      const auto after = params_of(engine, s.dtype);
      EXPECT_NE(after, params);
      const std::lock_guard lock(mutex);
      EXPECT_EQ(after, expected.try_emplace(s.dtype, after).first->second) << "rank " << rank;
    });
  }
}

TEST(StateTest, AParameterMayBeLoadedAgainAtAnyTime) {
  with_engines([&](StepEngine& engine, const Setting& s, int rank) {
    const auto before = read_all(engine);
    auto values = written(6, StateKind::kMaster);
    if (rank != 0) std::fill(values.begin(), values.end(), 5.0f);
    engine.load_param(6, {values.data(), kNumels[6], DType::kF32, {}});
    EXPECT_EQ(values, written(6, StateKind::kMaster));
    auto expected = before;
    expected[6] = values;  // its master, and nothing else
    EXPECT_EQ(read_all(engine), expected);
    const auto params = params_of(engine, s.dtype);
    const auto rounded = in_dtype(values, s.dtype);
    EXPECT_TRUE(std::equal(rounded.rbegin(), rounded.rend(), params.rbegin()));
  });
}

TEST(StateTest, StateThatIsNotThereIsAConfigError) {
  const auto expect_refused = [](const std::function<void()>& call, const char* part) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  test::run_ranks(2, [&](std::shared_ptr<comm::Communicator> comm) {
    StepEngine engine(comm, device::cpu_device(),
                      {{.name = "w", .numel = 2000}, {.name = "frozen", .numel = 2000, .trainable = false}},
                      {math::SgdHyper{.momentum = 0.9}}, {.stage = 2});
    engine.allocate_states();
    std::vector<float> values(2000);
    const BufferView view{values.data(), 2000, DType::kF32, {}};
    engine.read_state(0, StateKind::kState1, view);
    expect_refused([&] { engine.read_state(0, StateKind::kState2, view); }, "parameter w has 1 optimizer states");
    expect_refused([&] { engine.write_state(0, StateKind::kState2, view); }, "number 2");
    expect_refused([&] { engine.read_owned_state(0, StateKind::kState2, view); }, "number 2");
    expect_refused([&] { engine.read_state(1, StateKind::kMaster, view); }, "frozen is not trained");
    expect_refused([&] { engine.write_owned_state(1, StateKind::kGrad, view); }, "frozen is not trained");
  });
}

}  // namespace
}  // namespace zc::engine
