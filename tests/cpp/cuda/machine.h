// A simulated host with a GPU for each rank, where ranks are threads.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "cuda/fake_nccl.h"
#include "cuda/simulation.h"
#include "support/ranks.h"
#include "zc/cuda/backend.h"
#include "zc/cuda/cuda_kernels.h"
#include "zc/cuda/nccl_communicator.h"

namespace zc::cuda {

class Machine {
 public:
  explicit Machine(const Simulation::Options& options)
      : simulation_(std::make_shared<Simulation>(options)), nccl_(*simulation_) {
    for (int index = 0; index < options.num_devices; ++index) {
      devices_.push_back(std::make_unique<CudaDevice>(simulation_, index, make_cuda_kernels(*simulation_, index)));
    }
  }

  // Everything has ended in order, and is gone.
  ~Machine() {
    EXPECT_TRUE(wait_until_idle(std::chrono::seconds(20)));
    EXPECT_EQ(nccl_.num_live(), 0);
    EXPECT_EQ(nccl_.problems(), std::vector<std::string>());
    EXPECT_EQ(simulation_->problems(), std::vector<std::string>());
    for (int device = -1; device < simulation_->num_devices(); ++device) {
      EXPECT_EQ(simulation_->live_bytes(device), 0) << "device " << device;
    }
  }

  Simulation& simulation() { return *simulation_; }
  FakeNccl& nccl() { return nccl_; }
  CudaDevice& device(int rank) { return *devices_[static_cast<std::size_t>(rank)]; }

  std::shared_ptr<comm::Communicator> connect(std::string_view backend, std::shared_ptr<comm::Communicator> host,
                                              NcclOptions options = {}) {
    CudaDevice& own = device(host->rank());
    if (backend == "staged") return make_staged_communicator(std::move(host), own);
    return make_nccl_communicator(std::move(host), own, &nccl_.api(), options);
  }

  // Runs `body` as every rank.
  void run(std::string_view backend, const std::function<void(comm::Communicator&, CudaDevice&)>& body,
           std::chrono::milliseconds timeout = std::chrono::seconds(20), NcclOptions options = {}) {
    test::run_ranks(simulation_->num_devices(),
                    [&](std::shared_ptr<comm::Communicator> host) {
                      CudaDevice& own = device(host->rank());
                      const auto comm = connect(backend, std::move(host), options);
                      body(*comm, own);
                    },
                    {timeout});
  }

 private:
  std::shared_ptr<Simulation> simulation_;
  FakeNccl nccl_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
};

// An array in a device's memory. What is done to it is put on a stream.
template <class T>
class Array {
 public:
  Array(Machine& machine, CudaDevice& device, DType dtype, std::size_t numel)
      : simulation_(machine.simulation()),
        device_(device),
        memory_(device.allocate(static_cast<std::int64_t>(numel * sizeof(T)))),
        view_{memory_.get(), static_cast<std::int64_t>(numel), dtype, device.id()} {}

  operator BufferView() const { return view_; }  // NOLINT: it is a buffer
  const BufferView& view() const { return view_; }
  const Memory& memory() const { return memory_; }

  // value(i) for each i.
  template <class Value>
  void fill(device::Stream stream, Value value) {
    simulation_.enqueue(
        stream.handle,
        [data = view_.template as<T>(), numel = view_.numel, value, memory = memory_.get(), this_ = &simulation_] {
          this_->touches(memory, numel * static_cast<std::int64_t>(sizeof(T)), "fill");
          for (std::int64_t i = 0; i < numel; ++i) data[i] = value(static_cast<std::size_t>(i));
        },
        "fill");
  }
  void set(device::Stream stream, T value) {
    fill(stream, [value](std::size_t) { return value; });
  }

  // What the stream sees. Waits.
  std::vector<T> get(device::Stream stream) const {
    std::vector<T> values(static_cast<std::size_t>(view_.numel));
    device_.copy(view_, {values.data(), view_.numel, view_.dtype, {}}, stream);
    device_.synchronize(stream);
    return values;
  }

 private:
  Simulation& simulation_;
  CudaDevice& device_;
  Memory memory_;
  BufferView view_;
};

}  // namespace zc::cuda
