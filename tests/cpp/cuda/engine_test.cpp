// The whole step on devices that run behind: bits equal to the CPU's, whatever the order in which streams run, and
// nobody waits for the device within a step.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "cuda/machine.h"
#include "engine/training.h"

namespace zc::cuda {
namespace {

using engine::kNumels;
using engine::kNumParams;
using engine::Setting;
using engine::StepEngine;
using engine::StepResult;

// What a training is about, besides Setting.
struct Case {
  Setting setting;
  bool matrices = false;       // parameters 1 and 6 are Muon's
  int nonfinite_step = -1;     // in which some gradient of rank 0's is not finite
  bool busy_backward = false;  // a unit is gathered before each gradient
  bool loss_scale = false;
};

std::vector<zero::ParamSpec> specs_of(const Case& c) {
  auto specs = engine::specs(c.setting.dtype, c.setting.options.stage);
  if (!c.matrices) return specs;
  specs[1].group = specs[6].group = 1;
  specs[1].rows = 50, specs[6].rows = 25;
  specs[1].rows_by_columns = 50.0 / 60, specs[6].rows_by_columns = 25.0 / 100;
  return specs;
}

std::vector<optim::Hyper> groups_of(const Case& c) {
  std::vector<optim::Hyper> groups{c.setting.hyper};
  if (c.matrices) groups.push_back(math::MuonHyper{.lr = 0.02, .momentum = 0.95, .weight_decay = 0.1});
  return groups;
}

std::vector<float> gradient_of(const Case& c, int step, int micro_batch, int param) {
  auto values = engine::gradient(step, micro_batch, param);
  if (step == c.nonfinite_step && micro_batch == 0 && param == 4) values[7] = std::numeric_limits<float>::infinity();
  return values;
}

struct Outcome {
  std::vector<std::byte> params;
  std::vector<double> norms;
  std::vector<std::vector<int>> nonfinite;
  std::vector<double> scales;
  std::vector<std::int64_t> steps;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// The memory of one rank's tensors, as a framework has it: freed in the order of a stream, and then somebody else's.
class Tensors {
 public:
  explicit Tensors(device::Device& device, Simulation* simulation, device::Stream stream)
      : device_(device), simulation_(simulation), stream_(stream) {}

  BufferView make(std::int64_t numel, DType dtype) {
    const std::int64_t bytes = numel * size_bytes(dtype);
    auto& free = free_[bytes];
    if (free.empty()) free.push_back(device_.allocate(bytes));
    Memory memory = std::move(free.back());
    free.pop_back();
    const BufferView view{memory.get(), numel, dtype, device_.id()};
    held_[view.data] = std::move(memory);
    return view;
  }

  BufferView make(std::vector<std::byte> values, DType dtype) {
    const BufferView view = make(static_cast<std::int64_t>(values.size()) / size_bytes(dtype), dtype);
    const auto write = [view, values = std::move(values)] {
      if (!values.empty()) std::memcpy(view.data, values.data(), values.size());
    };
    put(write);
    return view;
  }

  void free(const BufferView& view) {
    put([view] {
      if (view.bytes() > 0) std::memset(view.data, 0xff, static_cast<std::size_t>(view.bytes()));
    });
    free_[view.bytes()].push_back(std::move(held_.at(view.data)));
    held_.erase(view.data);
  }

  std::vector<std::byte> read(const BufferView& view) {
    std::vector<std::byte> values(static_cast<std::size_t>(view.bytes()));
    device_.copy({view.data, view.bytes(), DType::kU8, view.device}, {values.data(), view.bytes(), DType::kU8, {}},
                 stream_);
    device_.synchronize(stream_);
    return values;
  }

 private:
  template <class Work>
  void put(Work work) {
    if (simulation_ != nullptr) {
      simulation_->enqueue(stream_.handle, work, "tensor");
    } else {
      work();
    }
  }

  device::Device& device_;
  Simulation* simulation_;
  device::Stream stream_;
  std::map<std::int64_t, std::vector<Memory>> free_;
  std::map<void*, Memory> held_;
};

class Trainer {
 public:
  Trainer(const Case& c, std::shared_ptr<comm::Communicator> comm, device::Device& device, Simulation* simulation,
          device::Stream stream)
      : case_(c), rank_(comm->rank()), device_(device), stream_(stream), tensors_(device, simulation, stream) {
    engine::Options options = c.setting.options;
    if (c.loss_scale) options.loss_scale = math::LossScaleRule{};
    engine_ = std::make_unique<StepEngine>(std::move(comm), device, specs_of(c), groups_of(c), options);
    engine_->set_stream(stream);
    for (int p = 0; p < kNumParams; ++p) {
      // Other ranks' values must be replaced.
      const auto values =
          tensors_.make(engine::in_dtype(engine::gradient(-1, rank_ == 0 ? 0 : 99, p), DType::kF32), DType::kF32);
      engine_->load_param(p, values);
      tensors_.free(values);
    }
    engine_->allocate_states();
  }
  ~Trainer() { device_.synchronize(stream_); }

  void step(int step) {
    const Setting& s = case_.setting;
    const int micro_steps = (s.micro_batches + s.num_ranks - 1) / s.num_ranks;
    for (int k = 0; k < micro_steps; ++k) micro_step(step, k * s.num_ranks + rank_);
    engine_->gatherer().invalidate();
    engine_->step(groups_of(case_), s.micro_batches, s.max_norm, 0);
  }

  const StepResult& result() { return engine_->result(); }

  void note(Outcome& outcome) {
    const StepResult& result = engine_->result();
    outcome.norms.push_back(result.scalars.grad_norm);
    outcome.nonfinite.push_back(result.nonfinite);
    outcome.scales.push_back(engine_->loss_scale().scale);
  }

  // Collective in stage 3.
  void finish(Outcome& outcome) {
    outcome.steps.assign(engine_->param_steps().begin(), engine_->param_steps().end());
    std::map<int, BufferView> full;
    for (int unit = 0; unit < engine_->gatherer().num_units(); ++unit) full.merge(gather(unit, false));
    const DType dtype = case_.setting.dtype;
    for (int p = 0; p < kNumParams; ++p) {
      const auto where = engine_->layout().location(p);
      const auto at = engine_->param_memory(p);
      const std::int64_t offset = where.offset * size_bytes(dtype);
      std::byte* const begin =
          full.contains(where.bucket) ? full[where.bucket].as<std::byte>() + offset : at.memory.get() + at.offset_bytes;
      const auto bytes = tensors_.read({begin, kNumels[p], dtype, device_.id()});
      outcome.params.insert(outcome.params.end(), bytes.begin(), bytes.end());
    }
  }

 private:
  // Gathered in a forward and released again; what is returned may be read when it is not training.
  std::map<int, BufferView> gather(int unit, bool training) {
    zero::ParamGatherer& gatherer = engine_->gatherer();
    std::map<int, BufferView> full;
    gatherer.enter(unit, zero::ParamGatherer::Pass::kForward, training);
    for (int b : gatherer.buckets(unit)) {
      const zero::BucketLayout& layout = engine_->layout().buckets()[static_cast<std::size_t>(b)];
      full[b] = tensors_.make(layout.numel, layout.compute_dtype);
      gatherer.start(b, full[b]);
    }
    gatherer.wait(unit);
    gatherer.leave(unit, training);
    if (training) {
      for (const auto& [bucket, view] : full) tensors_.free(view);
    }
    return full;
  }

  void micro_step(int step, int j) {
    const Setting& s = case_.setting;
    zero::GradReducer& reducer = engine_->reducer();
    for (int unit = 0; unit < engine_->gatherer().num_units(); ++unit) gather(unit, true);
    reducer.begin_micro_step(j < s.micro_batches);
    std::map<int, BufferView> grads;
    const auto launched = [&](std::span<const int> buckets) {
      for (int bucket : buckets) {
        std::erase_if(grads, [&](const auto& entry) {
          if (engine_->layout().location(entry.first).bucket != bucket) return false;
          tensors_.free(entry.second);
          return true;
        });
      }
    };
    for (int p = kNumParams - 1; p >= 0; --p) {
      // In stage 3 the backward gathers what it needs, between gradients.
      if (s.options.stage == 3 && (case_.busy_backward || p % 3 == 1)) gather(p / 3 % 3, true);
      if (p == 3 && j % 2 == 1) continue;
      grads[p] = tensors_.make(engine::in_dtype(gradient_of(case_, step, j, p), s.dtype), s.dtype);
      launched(reducer.ready(p, grads[p]));
    }
    EXPECT_TRUE(reducer.end_micro_step().empty());
    for (const auto& [param, view] : grads) tensors_.free(view);
    engine_->gatherer().end_micro_step();
  }

  const Case& case_;
  int rank_;
  device::Device& device_;
  device::Stream stream_;
  Tensors tensors_;
  std::unique_ptr<StepEngine> engine_;
};

Outcome train_on_cpu(Case c) {
  Outcome outcome;
  c.setting.num_ranks = 1;
  c.setting.options.stage = 0;
  c.setting.options.units.clear();
  test::run_ranks(1, [&](std::shared_ptr<comm::Communicator> comm) {
    Trainer trainer(c, comm, device::cpu_device(), nullptr, {});
    for (int step = 0; step < c.setting.steps; ++step) {
      trainer.step(step);
      trainer.note(outcome);
    }
    trainer.finish(outcome);
  });
  return outcome;
}

// asks: for each step's result before the next begins; else the next step does.
Outcome train_on_devices(const Case& c, const char* backend, Simulation::Options options, bool asks) {
  options.num_devices = c.setting.num_ranks;
  std::vector<Outcome> outcomes(static_cast<std::size_t>(c.setting.num_ranks));
  Machine machine(options);
  test::run_ranks(c.setting.num_ranks, [&](std::shared_ptr<comm::Communicator> host) {
    const int rank = host->rank();
    Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    CudaDevice& device = machine.device(rank);
    const auto stream = device.make_stream();
    const auto comm = machine.connect(backend, std::move(host));
    Trainer trainer(c, comm, device, &machine.simulation(), *stream);
    for (int step = 0; step < c.setting.steps; ++step) {
      const auto before = machine.simulation().waits();
      trainer.step(step);
      const auto after = machine.simulation().waits();
      if (step > 0 && std::string_view(backend) == "nccl") {
        EXPECT_EQ(after.synchronizations - before.synchronizations, 0) << "step " << step;
        if (asks) {
          EXPECT_EQ(after.questions - before.questions, 0) << "step " << step;
        }
      }
      if (asks || step + 1 == c.setting.steps) {
        trainer.note(outcome);
      }
    }
    trainer.finish(outcome);
  });
  for (const Outcome& outcome : outcomes) EXPECT_TRUE(outcome == outcomes[0]);
  return outcomes[0];
}

void expect_same(const Case& c, const Outcome& expected, const char* backend, const Simulation::Options& options,
                 bool asks) {
  const Outcome got = train_on_devices(c, backend, options, asks);
  EXPECT_EQ(got.params, expected.params);
  EXPECT_EQ(got.steps, expected.steps);
  if (!asks) return;
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_EQ(got.nonfinite, expected.nonfinite);
  EXPECT_EQ(got.scales, expected.scales);
}

std::string describe(const Case& c, unsigned seed) {
  return concat(name(c.setting.dtype), ", ", c.setting.num_ranks, " ranks, stage ", c.setting.options.stage,
                ", buckets of ", c.setting.options.bucket_numel, ", optimizer ", c.setting.hyper.index(),
                c.matrices ? " and Muon" : "", ", seed ", seed);
}

TEST(DeviceEngineTest, SameBitsAsTheCpuInAnyOrderOfStreams) {
  const std::vector<optim::Hyper> optimizers{
      math::AdamHyper{.lr = 0.01, .weight_decay = 0.1}, math::SgdHyper{.lr = 0.1, .momentum = 0.9, .nesterov = true},
      math::LionHyper{.lr = 0.01, .weight_decay = 0.1}, math::AdagradHyper{.lr = 0.05}};
  unsigned seed = 0;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (std::size_t o = 0; o <= optimizers.size(); ++o) {
      Case c;
      c.setting.dtype = dtype;
      c.matrices = o == optimizers.size();
      c.setting.hyper = optimizers[c.matrices ? 0 : o];
      c.nonfinite_step = 1;
      c.setting.steps = 4;
      c.loss_scale = o % 2 == 0;
      const Outcome expected = train_on_cpu(c);
      ASSERT_EQ(expected.nonfinite[1], std::vector<int>{4});
      for (int num_ranks : {1, 2, 3, 4}) {
        for (int stage : {0, 1, 2, 3}) {
          for (std::int64_t bucket_numel : {std::int64_t{3000}, std::int64_t{1} << 20}) {
            c.setting.num_ranks = num_ranks;
            c.setting.options = engine::options_of(stage, bucket_numel);
            SCOPED_TRACE(describe(c, seed));
            expect_same(c, expected, "nccl", {.seed = seed}, seed / 4 % 2 == 0);
            ++seed;
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// Where it did, the process would end here: the memory can be read and written only while streams run.
TEST(DeviceEngineTest, TheHostDoesNotTouchTheMemoryOfDevices) {
  for (int stage : {0, 1, 2, 3}) {
    for (const char* backend : {"nccl", "staged"}) {
      Case c;
      c.matrices = true;
      c.loss_scale = true;
      c.nonfinite_step = 1;
      c.setting.dtype = DType::kBF16;
      c.setting.steps = 3;
      const Outcome expected = train_on_cpu(c);
      c.setting.num_ranks = 2;
      c.setting.options = engine::options_of(stage, 3000);
      SCOPED_TRACE(concat(backend, " ", describe(c, 2)));
      expect_same(c, expected, backend, {.seed = 2, .guard_memory = true}, true);
    }
  }
}

// A rank that does not use a parameter launches its bucket later than the others, behind gathers that wait for them. So
// these must not make their gathers wait for that bucket.
TEST(DeviceEngineTest, RanksThatUseOtherParametersDoNotWaitForEachOtherInACircle) {
  Case c;
  c.busy_backward = true;
  c.setting.options = engine::options_of(3, 1000);
  c.setting.options.num_grad_buffers = 1;
  const Outcome expected = train_on_cpu(c);
  for (int num_ranks : {2, 3}) {
    for (const char* backend : {"nccl", "staged"}) {
      for (unsigned seed : {0u, 1u, 2u, 3u}) {
        c.setting.num_ranks = num_ranks;
        SCOPED_TRACE(concat(backend, " ", describe(c, seed)));
        expect_same(c, expected, backend, {.seed = seed}, true);
      }
    }
  }
}

}  // namespace
}  // namespace zc::cuda
