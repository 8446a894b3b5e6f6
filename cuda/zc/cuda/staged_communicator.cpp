// Collectives of a GPU's memory by way of host memory: for ranks that share a GPU.
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "zc/base/float_environment.h"
#include "zc/cuda/nccl_communicator.h"
#include "zc/cuda/over_host.h"
#include "zc/device/transfer.h"

namespace zc::cuda {
namespace {

using comm::Op;
using comm::Work;

// A thread of its own carries the collectives out, one after the other, since the caller must not wait for peers, who
// may be waiting for it in another group. So its collectives are those of a group of their own, too.
class StagedCommunicator final : public OverHost {
 public:
  StagedCommunicator(std::shared_ptr<comm::Communicator> host, CudaDevice& device)
      : OverHost(std::move(host), device),
        carrier_(split_host(0, rank())),
        stream_(device.make_stream()),
        copied_(device.make_event()),
        thread_([this] { run(); }) {}

  ~StagedCommunicator() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    thread_.join();  // what is in flight ends, or times out
  }

  const char* backend() const override { return "staged"; }
  std::int64_t staging_bytes() const override { return carrier_->staging_bytes(); }

 private:
  struct Task {
    Call call;
    std::string label;
    std::unique_ptr<device::Event> begin;
    std::shared_ptr<Work::State> state;
    std::chrono::milliseconds timeout;
  };

  // A staging buffer in host memory.
  struct Buffer {
    Memory memory{};
    std::int64_t bytes = 0;
  };

  Work run_on_device(const Call& call) override {
    auto state = std::make_shared<Work::State>();
    Task task{call, std::string(call.label), device_.make_event(), state, timeout()};
    task.begin->record(call.after);
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    wake_.notify_all();
    return Work(std::move(state));
  }

  std::shared_ptr<comm::Communicator> run_split(const Call&, int color, int key) override {
    return std::make_shared<StagedCommunicator>(split_host(color, key), device_);
  }

  void run() {
    pthread_setname_np(pthread_self(), "zc-staged");
    OnDevice::own_thread();
    const DefaultFloatEnvironment environment;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        carry_out(task);
        task.state->complete();
      } catch (const Error& error) {
        give_up(error, *task.state);
      } catch (const std::exception& error) {
        give_up(Error(ErrorKind::kInternal, concat("[cuda] ", error.what())), *task.state);
      }
      lock.lock();
    }
  }

  void give_up(const Error& error, Work::State& state) {
    carrier_->announce_failure(error.what());
    state.complete(error);
  }

  void carry_out(const Task& task) {
    Call call = task.call;
    call.label = task.label;
    call.after = {};
    const bool in_place = call.op == Op::kBroadcast || call.op == Op::kAllReduce;
    const bool reads_out = in_place || (call.op == Op::kReduceScatterAdd && !call.first);
    task.begin->order(*stream_);
    if (!in_place) call.in = stage(in_, call.in, true);
    call.out = stage(out_, call.out, reads_out);
    if (in_place) call.in = call.out;
    wait("what is to be sent");
    carrier_->set_timeout(task.timeout);
    run_by(*carrier_, call).wait();
    device_.copy(call.out, task.call.out, *stream_);
    wait("what was received");
  }

  // Where `view` goes in host memory; it is put on its way there when it is to be read.
  BufferView stage(Buffer& buffer, const BufferView& view, bool read) {
    if (view.bytes() > buffer.bytes) buffer = {device_.allocate_pinned(view.bytes()), view.bytes()};
    const BufferView staged{buffer.memory.get(), view.numel, view.dtype, {}};
    if (read) device_.copy(view, staged, *stream_);
    return staged;
  }

  void wait(const char* what) {
    copied_->record(*stream_);
    device::wait_for(*copied_, what);
  }

  std::shared_ptr<comm::Communicator> carrier_;
  std::shared_ptr<const device::Stream> stream_;
  std::unique_ptr<device::Event> copied_;
  Buffer in_, out_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<comm::Communicator> make_staged_communicator(std::shared_ptr<comm::Communicator> host,
                                                             CudaDevice& device) {
  return std::make_shared<StagedCommunicator>(std::move(host), device);
}

}  // namespace zc::cuda
